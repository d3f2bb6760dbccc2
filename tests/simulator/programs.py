"""What all simulated programs share, and the learner's coordinator."""

import math

from msgspec.structs import replace
from support.messages import HELLO

from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.link import TrainerStart
from apex.transport.messages.control import Hello
from apex.transport.timing import HELLO_SECONDS, REPORT_SECONDS
from apex.types import Progress

HEARTBEAT_SECONDS = 1.0


class Program:
    """A program that joins the run and, if it ended, is started again after a pause."""

    def __init__(self, world, name, *, starts=True, restarts=True):
        self.world, self.name = world, name
        self.alive, self.session = False, 0
        self.back_at = 0.0 if starts else math.inf
        self.stopped_until = 0.0  # by SIGSTOP
        self._restarts = restarts
        self._mail = []  # (request, answer) of the program that it joins

    joined = False

    def step(self):
        """One turn of the main loop."""
        now = self.world.clock.now
        if now < self.stopped_until:
            return
        if not self.alive and now >= self.back_at:
            self.alive, self.session = True, self.world.rng.getrandbits(52)
            self.asked_at = self.beat_at = -math.inf
            self.world.note(f"{self.name} starts with session {self.session}")
        mail, self._mail = self._mail, []
        for request, answer in mail:  # The answers to earlier lives, and to a Hello after the welcome, have no reader.
            if self.alive and request.session == self.session and self.expects(request):
                self.take(answer)
        if self.alive and self.joined:
            if now - self.beat_at >= HEARTBEAT_SECONDS:
                self.beat_at = now
                self.ask(self.heartbeat())
            self.work(now)
        elif self.alive and now - self.asked_at >= HELLO_SECONDS:
            self.asked_at = now
            self.ask(self.join_request())

    def join_request(self):
        """Returns the request that joins."""
        return replace(HELLO, session=self.session, host=self.name, **self.wishes)

    def expects(self, request):
        return isinstance(request, Hello) is not self.joined

    def ask(self, request):
        head = self.world.head
        self.world.network.post(self.name, head.name, head.take, self, request, ordered=True)

    def answer(self, request, answer):
        """Called by the network when an answer of the learner, or of the server of tables, arrives."""
        self._mail.append((request, answer))

    def end(self, why, pause=None):
        """The process ends. `pause`: seconds until its supervisor starts it again."""
        pause = self.world.rng.uniform(0, 4) if pause is None else pause
        self.alive, self.back_at = False, self.world.clock.now + pause if self._restarts else math.inf
        self._mail.clear()
        self.world.counts[why] += 1
        self.world.note(f"{self.name} ends: {why}")


class Learner:
    """The coordinator. A restart forgets all that is not in the run folder."""

    name = "learner"

    def __init__(self, world):
        self.world = world
        self.back_at = self.stopped_until = 0.0
        self.coordinator = None

    def step(self):
        now = self.world.clock.now
        if now < self.stopped_until:
            return
        if self.coordinator is None and now >= self.back_at:
            epoch = self.world.run.next_epoch(clock=self.world.wall_clock)
            self.coordinator = Coordinator(self.world.run, epoch=epoch, clock=self.world.clock)
            self.coordinator.receive(TrainerStart(10, 0, Progress()))
            self.tick_at = now
        if self.coordinator is not None and now >= self.tick_at:
            self.tick_at = now + REPORT_SECONDS
            self.coordinator.tick()

    def take(self, program, request):
        """Called by the network when a request arrives."""
        if self.coordinator is None or self.world.clock.now < self.stopped_until:
            return
        answer = self.coordinator.answer(request)
        self.world.ledger.answered(request, answer)
        if answer is not None:
            self.world.network.post("learner", program.name, program.answer, request, answer, ordered=True)

    def kill(self):
        if self.coordinator is not None:
            self.coordinator = None
            self.back_at = self.world.clock.now + self.world.rng.uniform(0, 6)
            self.world.ledger.restart_learner()
