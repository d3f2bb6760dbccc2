"""What the learner's coordinator decides: who is welcome, who holds which actor ids, and when the run is over.

It has no socket. `server` moves its messages; a serial run calls it directly.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from apex.config import to_dict
from apex.learning.coordinator.leases import LeaseTable
from apex.learning.coordinator.link import FromTrainer, News, TrainerEnd, TrainerReport, TrainerStart
from apex.learning.coordinator.metric_rows import MetricRows, evaluation_row
from apex.metric_tags import EPISODES, actor_tags
from apex.replay_memory.store.location import memory_id
from apex.runs.checkpoints.best_policy import BestPolicy, games_of
from apex.runs.folder import RunFolder
from apex.runs.metrics.truncate import cut_curves
from apex.runs.metrics.writer import MetricRow, MetricsWriter
from apex.runs.state import RunState
from apex.runs.status import summarize
from apex.transport.header import WireError
from apex.transport.messages import control
from apex.transport.messages.results import ActorFigures, EvaluationResult
from apex.transport.messages.run_status import RunStatus
from apex.transport.messages.status import LearnerStatus
from apex.transport.timing import FORGET_SECONDS, TAKEOVER_HEARTBEATS
from apex.types import Parameters, Role

MAX_ASKING = 1_000  # replay servers that wait for a shard
MAX_REPLACED = 1_000  # sessions that are remembered
OF_A_CLOCK = {f"replay/{name}" for name in ("inserts_per_second", "samples_per_second", "busy_share")}
END = control.StateAnswer(stop=True)  # what is said of a run that is over


class Coordinator:
    """Answers programs, keeps curves and the best policy, and knows when the run is over."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        epoch: int,
        deterministic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`epoch`: how often the learner of this run has started.

        `deterministic`: the parts of the run take turns, so that no part limits another, and curves show no figure
        that a clock has measured.
        """
        self.num_parameters = 0  # 0: the trainer has not built its network; nobody is welcome before
        self._folder = folder
        self._config = config = folder.config
        self._clock = clock
        self.state = RunState(
            config,
            name=folder.path.name,
            folder=str(folder.path),
            elapsed_seconds=folder.elapsed_seconds,
            finds_bottleneck=not deterministic,
            clock=clock,
        )
        self._leases = LeaseTable(config.actor.num_actors, config.transport.lease_seconds, epoch)
        self._best_policy = BestPolicy(folder.checkpoints, config, folder.schema)
        self.state.best_score = self._best_policy.score
        self._metrics = MetricsWriter(folder.path)
        self._rows = MetricRows(self.state, OF_A_CLOCK if deterministic else ())
        self._tags = actor_tags(self.state.epsilons)
        self._curves_began = False  # whether it is known how many steps they go on from
        self._asked: dict[int, float] = {}  # when a replay server first asked for a shard that another one may hold
        self._holders: dict[int, int] = {}  # by shard the session of the replay server that the run goes on with
        self._replaced: deque[int] = deque(maxlen=MAX_REPLACED)  # sessions of replay servers that another one followed

    def status(self) -> RunStatus:
        """What the run is doing."""
        return summarize(self.state, self._metrics.latest)

    # --- programs ---------------------------------------------------------------------------------------------------

    def answer(self, request: control.Request) -> control.Answer | None:
        """What a request is answered with, if anything; raises WireError for one that cannot be."""
        match request:
            case control.StatusRequest():
                return self.status()
            case control.Goodbye():
                self._replace(request.session)
                self._leases.release(request.session)
                self.state.members.forget(request.session)
                return None
            case control.Hello():
                return self._answer_hello(request)
        return self._answer_heartbeat(request)

    def _answer_hello(self, hello: control.Hello) -> control.Answer:
        if self.state.finished:
            return END
        if hello.role == Role.REPLAY:
            if (answer := self._turn_away(hello)) is not None:
                return answer
            self._replace(self._holders.get(hello.shard, hello.session), by=hello.session)
            self._holders[hello.shard] = hello.session
        return control.WelcomeAnswer(
            run_id=self._folder.run_id,
            config=to_dict(self._config),
            schema=self._folder.schema,
            num_parameters=self.num_parameters,
            num_actors=self._config.actor.num_actors,
            memory=memory_id(),
            replay=self.state.members.all_replay_endpoints,
            absent=self.state.members.absent_replay,
            streams=self._leases.claim(hello.session, hello.num_streams, self._clock()),
        )

    def _turn_away(self, hello: control.Hello) -> control.Answer | None:
        """What a replay server that says hello is told if another one holds its shard; None if nobody does.

        The server before may have been killed a moment ago. It is alive if it is heard later than a heartbeat after the
        newcomer has asked: what it sent before its death may be read until then. If it is silent for two heartbeats it
        is dead. In between the newcomer waits, and asks again.
        """
        replay, shard, session, now = self._config.replay, hello.shard, hello.session, self._clock()
        if not 0 <= shard < replay.num_shards:
            shards = f"replay.num_shards {replay.num_shards}, 0 ... {replay.num_shards - 1}"
            return control.RefusedAnswer(f"--shard {shard}: this run has {shards}")
        member = self.state.members.replay_servers.get(shard)
        heartbeat_seconds = self._config.transport.heartbeat_seconds
        longest = TAKEOVER_HEARTBEATS * heartbeat_seconds
        if member is None or member.heartbeat.session == session or now - member.seen_at > longest:
            self._asked.pop(session, None)
            return None
        holder = member.heartbeat
        if len(self._asked) > MAX_ASKING:
            self._asked.clear()  # Whoever means it asks again.
        if member.seen_at <= self._asked.setdefault(session, now) + heartbeat_seconds:
            return control.WaitAnswer(holder=holder.session, host=holder.host, run_id=self._folder.run_id)
        where = f"{replay.shard_name(shard)} is there already: process {holder.pid} on {holder.host}"
        return control.RefusedAnswer(f"{where}; stop it, or name another --shard")

    def _replace(self, session: int, by: int | None = None) -> None:
        """Notes that nothing more is taken from a replay server; `by`: who follows it."""
        if session != by and session in self._holders.values():
            self._holders = {shard: holder for shard, holder in self._holders.items() if holder != session}
            self._replaced.append(session)

    def _is_replaced(self, heartbeat: control.AnyHeartbeat) -> bool:
        """Whether a heartbeat comes from a replay server whose shard another one holds, as after a cut network."""
        if not isinstance(heartbeat, control.ReplayHeartbeat):
            return False
        holder = self._holders.get(heartbeat.shard, heartbeat.session)
        return heartbeat.session in self._replaced or holder != heartbeat.session

    def _answer_heartbeat(self, heartbeat: control.AnyHeartbeat) -> control.Answer:
        if heartbeat.run_id != self._folder.run_id:
            return control.RefusedAnswer("this is another run")
        if self._is_replaced(heartbeat):
            return control.RefusedAnswer("another replay server has taken its place")
        if not self._leases.renew(heartbeat.session, heartbeat.streams, self._clock()):
            return control.RefusedAnswer("its actor ids were leased to another")
        try:
            self.state.hear(heartbeat)
        except ValueError as error:
            raise WireError("fields", str(error)) from error
        self.state.num_leased = self._leases.num_leased
        wanted = False
        if isinstance(heartbeat, control.ReplayHeartbeat):
            self._holders.setdefault(heartbeat.shard, heartbeat.session)
            wanted = self.state.members.inserts_wanted(heartbeat.shard)
        return control.StateAnswer(self.state.finished, wanted)

    # --- the trainer ------------------------------------------------------------------------------------------------

    def hear_trainer(self, message: FromTrainer) -> None:
        """Takes what the trainer says."""
        match message:
            case TrainerStart():
                self.num_parameters = message.num_parameters
                self.state.go_on(message.progress)
                self.state.hear_trainer(LearnerStatus(updates=message.updates))
            case TrainerReport():
                self.state.hear_trainer(message.status)
            case TrainerEnd():
                self.state.reason = self.state.reason or message.reason
                self.state.finished = True

    def decide(self) -> News:
        """Decides whether the run should end; returns what the trainer should know."""
        state = self.state
        endpoints = list(state.members.replay_endpoints)  # A copy: what was told must not change with it.
        return News(endpoints, state.members.absent_replay, state.judge(), state.progress)

    # --- curves and scores ------------------------------------------------------------------------------------------

    def keep_figures(self, figures: ActorFigures) -> None:
        """Adds an actor's figures to the curves. Of its episodes the curves have the number in all lives of the run."""
        scalars = {tag: math.nan if x is None else x for tag, x in figures.scalars.items() if tag in self._tags}
        if 0 <= scalars.get(EPISODES, -1) < 2**31:
            self.state.num_episodes += int(scalars[EPISODES])
            scalars[EPISODES] = self.state.num_episodes
        if self._begin_curves():
            self._metrics.accept(MetricRow("actor", self.state.num_steps, scalars, figures.time))

    def keep_evaluation(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Keeps an evaluation, and its parameters when they are the best so far.

        The first confirmed score ends the run at once, and is its last: the evaluator plays on until it is told, and
        what comes with it or right after it must not take its place.
        """
        state = self.state
        if state.reason and state.evaluation is not None and state.evaluation.confirmed:
            return
        state.best_score = self._best_policy.keep(result.mean, parameters, games_of(result))
        state.evaluation = result
        state.judge()
        if self._begin_curves():
            self._metrics.accept(evaluation_row(state.num_steps, result, state.best_score))

    def write_rows(self) -> None:
        """Adds to the curves what is known now; to be called once a second."""
        if self._begin_curves():
            for row in self._rows.next():
                self._metrics.accept(row)
            self._metrics.flush()

    def tick(self) -> None:
        """Notes the time, and forgets who is silent; to be called once a second."""
        self._folder.elapsed_seconds = self.state.elapsed_seconds
        self.state.members.forget_silent(FORGET_SECONDS)
        self._leases.expire(self._clock())

    def close(self) -> None:
        """Ends the curves."""
        self._metrics.close()

    def _begin_curves(self) -> bool:
        """Whether the curves may go on. What they have of steps that a resumed run makes again is cut off first.

        How many steps there are is known when every replay server has said what it holds.
        """
        state = self.state
        if not self._curves_began and (state.num_steps == 0 or state.members.all_replay_endpoints):
            self._curves_began = True
            self._metrics.begin(state.num_steps)
            cut_curves(self._folder.curves, state.num_steps)
        return self._curves_began
