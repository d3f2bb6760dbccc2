"""The driver's view of a run's units: Ray places them; the driver sends them orders, and again after a unit is lost."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apex.config import Config, from_dict, to_dict
from apex.config.role_command import module_command, role_command
from apex.errors import FAILED, FINISHED, HOPELESS, NEIGHBOUR_GONE, REFUSED
from apex.launch.guard import Order
from apex.launch.niceness import actor_niceness
from apex.launch.ray.cluster import make_actor_host, make_head
from apex.launch.ray.options import RayEngine
from apex.launch.ray.unit import Place
from apex.runtime.supervisor import REST_SECONDS, CrashBudget, Ending
from apex.types import Role
from apex.version import VERSION

PENDING_SECONDS = 5.0  # time a unit may wait for a node before a message names what it waits for
AGAIN_SECONDS = 1.0  # time between two requests to a unit that Ray is restarting
READ_SECONDS = 2.0  # time between two reads of the address of the head's control socket
GRACE_SECONDS = 15.0  # time for units to end their programs, which normally need less


class Fleet:
    """The head and the actor hosts."""

    def __init__(
        self,
        ray: Any,
        config: Config,
        engine: RayEngine,
        folder: Path,
        *,
        argv: Sequence[str],
        begun: bool,
        tell: Callable[[str], None],
        point: Callable[[str], None],
    ) -> None:
        """`folder`: the driver's folder with each unit's keys; `point` is called with the learner's HOST:PORT."""
        self.ray = ray
        self.tell = tell
        self.config = config
        self._engine = engine
        self._folder = folder
        self._argv = tuple(argv)
        self._begun = begun
        self._point = point
        self._learner = ""  # HOST:PORT of the learner's control socket; "" while unknown
        self._reading: Any = None  # pending read of the head's configuration
        self._read_at = 0.0
        device, gpus = config.learner.device, ray.cluster_resources().get("GPU", 0)
        gpu = device == "cuda" or (device == "auto" and gpus >= 1)
        head, self._group = make_head(ray, engine.head_cpus, gpu=gpu)
        self._head = Member(self, "head", head, f"{engine.head_cpus} CPUs{' and a GPU' * gpu}", self._order_head)
        self._actors: list[Member] = []

    def _make_actor_hosts(self) -> list[Member]:
        cpus, hosts = self._engine.cpus_per_host, range(self._engine.actor_hosts)
        units = [make_actor_host(self.ray, cpus) for _ in hosts]
        return [Member(self, f"actor-{i}", units[i], f"{cpus} CPUs", self._order_actor) for i in hosts]

    def check(self) -> Ending | None:
        """Checks all units and sends due orders; returns an ending if the run has ended."""
        if (ending := self._head.check()) is not None:
            return ending._replace(status=FAILED) if ending.status == HOPELESS else ending
        if self._head.running and not self._actors:  # Created earlier, they might take the head's CPUs.
            self._actors = self._make_actor_hosts()
        self._follow_head()
        for member in list(self._actors):
            if (ending := member.check()) is None:
                continue
            if ending.status == FINISHED:
                member.rest(REST_SECONDS)  # Perhaps the whole run is ending.
                continue
            self._actors.remove(member)
            member.give_back(deadline=0.0)
            self.tell(f"{ending.cause}; the run continues without this actor host")
            if not self._actors:
                return Ending(FAILED, f"no actor host is left; {ending.cause}", member.name)
        return None

    def end(self) -> None:
        """Ends all programs: first the actors, then the head, which saves the run."""
        for group in (self._actors, [self._head]):
            for member in group:
                member.ask_to_stop()
            deadline = time.monotonic() + GRACE_SECONDS
            for member in group:
                member.give_back(deadline)
        self.ray.util.remove_placement_group(self._group)

    def _follow_head(self) -> None:
        """Reads the address of the head's control socket. If it has changed, actors get new orders."""
        if not self._head.running:
            self._reading = None
        elif self._reading is None and time.monotonic() >= self._read_at:
            self._read_at = time.monotonic() + READ_SECONDS
            path = Path(self.config.run.folder) / self.config.run.name / "config.toml"
            self._reading = self._head.handle.read.remote(str(path))
        if self._reading is None or not self.ray.wait([self._reading], timeout=0)[0]:
            return
        reading, self._reading = self._reading, None
        try:
            text = self.ray.get(reading)
        except self.ray.exceptions.RayError:  # The head was lost meanwhile.
            return
        self._begun = self._begun or bool(text)
        config = from_dict(tomllib.loads(text))
        learner = f"{config.transport.bind}:{config.transport.port('control')}"
        if not text or learner == self._learner:
            return
        self._learner = learner
        self._point(learner)
        curves = f"{config.run.tensorboard_bind}:{config.run.tensorboard_port}" if config.run.tensorboard else "off"
        self.tell(f"learner at {learner}; TensorBoard on that host: {curves}")
        for member in self._actors:
            member.ask_to_stop()

    def _order_head(self, name: str, place: Place) -> Order:
        transport = replace(self.config.transport, bind=place.address, keys="keys")
        run = to_dict(replace(self.config, transport=transport))
        cores = self._engine.head_cpus
        return self._order(name, "keys", run=run, begun=self._begun, cores=cores, argv=self._argv)

    def _order_actor(self, name: str, place: Place) -> Order | None:
        if not self._learner:
            return None
        keys, envs = self._folder / name / "keys", self.config.actor.envs_per_process
        processes = self._engine.cpus_per_host
        words = role_command(Role.ACTOR, learner=self._learner, keys=keys, processes=processes, envs=envs)
        run = self.config.run
        limits = {"stuck_seconds": run.stuck_seconds, "crash_budget": run.crash_budget}
        niceness = actor_niceness(self.config)
        return self._order(name, name, arguments=module_command(words), niceness=niceness, **limits)

    def _order(self, name: str, bundle: str, **what: Any) -> Order:
        keys = {path.name: path.read_text() for path in (self._folder / "secrets" / bundle).iterdir()}
        return Order(name=name, home=str(self._folder / name), keys=keys, **what)


class Member:
    """One unit, across its restarts."""

    def __init__(
        self, fleet: Fleet, name: str, handle: Any, needs: str, order: Callable[[str, Place], Order | None]
    ) -> None:
        """`order` returns the unit's next order, or None if it cannot be created yet."""
        self.name = name
        self.handle = handle
        self._fleet = fleet
        self._ray = fleet.ray
        self._needs = needs
        self._order = order
        self._budget = CrashBudget(fleet.config.run.crash_budget)
        self._place: Place | None = None
        self._asking: Any = None  # pending request for the unit's place
        self._run: Any = None  # pending result of the unit's order
        self._again_at = self._tell_at = 0.0

    @property
    def running(self) -> bool:
        """Whether the unit executes an order, as far as the driver knows."""
        return self._run is not None

    def check(self) -> Ending | None:
        """Sends due requests; returns an ending if this unit must not restart."""
        try:
            return self._check(time.monotonic())
        except self._ray.exceptions.ActorUnavailableError:
            if self._place is not None:
                self._fleet.tell(f"{self.name} was lost; Ray restarts it on a node with free CPUs")
            self.rest(AGAIN_SECONDS)
            return None
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if "Error" in line] or [repr(error)]
            return self._judge(time.monotonic(), FAILED, lines[-1])

    def _check(self, now: float) -> Ending | None:
        if self._run is not None:
            result = self._take(self._run)
            return None if result is None else self._judge(now, *result)
        if now < self._again_at:
            return None
        if self._place is None:
            self._asking = self._asking or self.handle.where.remote()
            if (answer := self._take(self._asking)) is None:
                self._say_what_lacks(now)
                return None
            self._asking, self._tell_at, self._place = None, 0.0, Place(*answer)
            there = f"{self.name} is on {self._place.host} ({self._place.address})"
            if self._place.version != VERSION:
                return Ending(REFUSED, f"{there}, which has apex {self._place.version}, not {VERSION}", self.name)
            self._fleet.tell(there)
        if (order := self._order(self.name, self._place)) is not None:
            self._run = self.handle.run.remote(order.encode(), os.getcwd())
        return None

    def _say_what_lacks(self, now: float) -> None:
        self._tell_at = self._tell_at or now + PENDING_SECONDS
        if now >= self._tell_at:
            self._tell_at = now + 10 * PENDING_SECONDS
            free, all_ = self._ray.available_resources().get("CPU", 0), self._ray.cluster_resources().get("CPU", 0)
            self._fleet.tell(f"{self.name} waits for a node with {self._needs}: {free:g} of {all_:g} CPUs are free")

    def _judge(self, now: float, status: int, cause: str) -> Ending | None:
        """Decides after the unit's programs have ended: returns an ending, or None to restart them."""
        cause = f"{self.name}: {cause or f'ended with status {status}'}"
        if status not in (FINISHED, REFUSED, HOPELESS, NEIGHBOUR_GONE) and self._budget.charge(1.0, now) is None:
            status = HOPELESS
        if status in (FINISHED, REFUSED, HOPELESS):
            return Ending(status, cause if status else "", self.name)
        if status != NEIGHBOUR_GONE:
            self._fleet.tell(f"{cause}; starting it again")
        self.rest(AGAIN_SECONDS)
        return None

    def rest(self, seconds: float) -> None:
        """Waits for `seconds`, then requests the unit's place and sends its order again."""
        self._run = self._asking = self._place = None
        self._again_at = time.monotonic() + seconds

    def ask_to_stop(self) -> None:
        """Makes the unit end its programs. Later calls of `check` send the next order."""
        if self.running:
            self.handle.stop.remote()

    def give_back(self, deadline: float) -> None:
        """Waits until the unit's programs have ended, at most until `deadline`, then removes the unit from Ray."""
        if self._run is not None:
            self._ray.wait([self._run], timeout=max(0.0, deadline - time.monotonic()))
        self._ray.kill(self.handle)

    def _take(self, reference: Any) -> Any:
        """Returns the result of a remote call, or None while the call is pending."""
        return self._ray.get(reference) if self._ray.wait([reference], timeout=0)[0] else None
