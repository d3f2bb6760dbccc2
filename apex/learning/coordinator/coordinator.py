"""Decides which programs may join a run, which session holds which actor ids, and when the run is over.

The coordinator has no socket. `server` passes messages to it; a run in a single process calls it directly.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from apex.algorithms.interface import make_algorithm
from apex.config import to_dict
from apex.facts import INTERRUPTED
from apex.learning.coordinator.bottleneck import useful_shards
from apex.learning.coordinator.fence import Fence
from apex.learning.coordinator.link import FromTrainer, News, TrainerEnd, TrainerReport, TrainerStart
from apex.learning.coordinator.metric_rows import MetricRows, evaluation_row, score_row
from apex.learning.coordinator.state import RunState
from apex.learning.coordinator.status import summarize
from apex.metric_tags import MAX_METRICS
from apex.runs.checkpoints.best_policy import BestPolicy, games_of
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import MetricsWriter, cut_curves
from apex.transport.hello import local_host, owner_name
from apex.transport.messages import control
from apex.transport.messages.fields import printable
from apex.transport.messages.results import EvaluationResult, Scores, ScoreSums
from apex.transport.messages.run_status import RunStatus
from apex.transport.messages.status import LearnerStatus
from apex.transport.timing import ABSENT_HEARTBEATS, FORGET_SECONDS, TAKEOVER_HEARTBEATS, pace_of
from apex.types import Parameters, Role, Tensor
from apexreplay.server.leases import LeaseTable
from apexreplay.store.location import memory_id
from apexreplay.wire.header import WireError

MAX_ASKING = 1_000  # maximum replay servers that wait for a shard
OF_A_CLOCK = {
    f"replay/{name}" for name in ("inserts_per_second", "inserted_steps_per_second", "samples_per_second", "busy_share")
}


class Coordinator:
    """Answers programs, keeps curves and the best policy, and decides when the run is over."""

    def __init__(
        self, folder: RunFolder, *, epoch: int, deterministic: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`epoch`: number of this start of the learner, see `RunFolder.next_epoch`.

        `deterministic`: whether all roles run alternately in one process. Then no bottleneck is searched for, and the
        curves contain no figure measured by a clock.
        """
        self.refused: Counter[str] = Counter()  # number of refused programs and heartbeats by reason
        self.num_parameters = 0  # 0: the trainer has not created its network yet, so no program may join
        self._parameters: list[Tensor] = []
        self._folder = folder
        self._config = config = folder.config
        self._clock = clock
        self.state = RunState(
            config,
            name=folder.path.name,
            folder=str(folder.path),
            exploration=make_algorithm(config, folder.schema).exploration(config.actor.num_actors),
            run_time=folder.run_time,
            finds_bottleneck=not deterministic,
            clock=clock,
        )
        self._leases = LeaseTable(config.actor.num_actors, config.transport.lease_seconds, epoch)
        self._best_policy = BestPolicy(folder.checkpoints, config, folder.schema)
        self.state.best_score = self._best_policy.score
        self._metrics = MetricsWriter(folder.path)
        self._rows = MetricRows(self.state, OF_A_CLOCK if deterministic else ())
        self._scores = ScoreSums()  # scores for the next row of the curves
        # evaluations without a row yet, each with the best score after it
        self._unwritten: list[tuple[EvaluationResult, float | None]] = []
        self._metric_names: list[str] = []  # of the environment's metrics, each of which has a curve
        self._curves_began = False  # whether the step from which the curves continue is known
        # session -> time of its first request for a shard that another server may hold
        self._asked: dict[int, float] = {}
        self._fence = Fence(folder.path, epoch)

    def status(self) -> RunStatus:
        """Returns the status of the run."""
        return summarize(self.state, self._metrics.latest)

    # --- programs ---------------------------------------------------------------------------------------------------

    @property
    def end_answer(self) -> control.StateAnswer:
        """The answer to every program after the end of the run."""
        return control.StateAnswer(True, interrupted=self.state.end == INTERRUPTED)

    def answer(self, request: control.Request) -> control.Answer | None:
        """Returns the answer to a request, or None for a Goodbye; raises WireError for an invalid request."""
        match request:
            case control.StatusRequest():
                return self.status()
            case control.Goodbye():
                is_last = self._fence.release(request.session) and self.state.over
                self._leases.release(request.session)
                # The last status shows the figures of the replay servers.
                self.state.members.forget(request.session, keeps_figures=is_last)
                return None
            case control.Hello():
                return self._answer_hello(request)
        return self._answer_heartbeat(request)

    def _answer_hello(self, hello: control.Hello) -> control.Answer:
        # A restarted evaluator must still evaluate the final policy.
        is_over = self.state.finished if hello.role == Role.EVALUATOR else self.state.over
        if is_over:
            return self.end_answer
        if hello.role == Role.REPLAY and (answer := self._turn_away(hello)) is not None:
            return answer
        return control.WelcomeAnswer(
            run_id=self._folder.run_id,
            config=to_dict(self._config),
            schema=self._folder.schema,
            table=self._folder.schema.table.to_dict(),
            num_parameters=self.num_parameters,
            parameters=self._parameters,
            num_actors=self._config.actor.num_actors,
            run=printable(self._folder.name),
            owner=owner_name(),
            memory=memory_id(),
            replay=self.state.members.all_replay_endpoints,
            absent=self.state.members.absent_replay,
            generation=self.state.members.generation,
            streams=list(map(control.Lease.of, self._leases.claim(hello.session, hello.num_streams, self._clock()))),
            shards=useful_shards(used.cores if (used := self.state.members.resources.get(Role.ACTOR)) else 0.0),
            fence=self._fence.grant(hello) if hello.role == Role.REPLAY else 0,
        )

    def _turn_away(self, hello: control.Hello) -> control.Answer | None:
        """Returns the answer to a new replay server whose shard another server may hold; None if the shard is free.

        The previous server may have been killed a moment ago. It counts as alive if a message from it arrives more than
        one heartbeat after the new server's first request: earlier messages may have been sent before its death. It
        counts as dead if it is silent for two heartbeats. Meanwhile the new server waits and asks again. If the learner
        was started again and the holder has not been heard yet, the two heartbeats begin with that first request.
        """
        replay, shard, session, now = self._config.replay, hello.shard, hello.session, self._clock()
        if not 0 <= shard < replay.num_shards:
            shards = f"replay.num_shards {replay.num_shards}, 0 ... {replay.num_shards - 1}"
            return self._refuse("shard", f"--shard {shard}: this run has {shards}")
        if len(self._asked) > MAX_ASKING:
            self._asked.clear()  # Live servers ask again.
        holder, member = self._fence.find(shard), self.state.members.replay_servers.get(shard)
        heartbeat_seconds, asked_at = self._config.transport.heartbeat_seconds, self._asked.setdefault(session, now)
        silent_since = asked_at if member is None else member.seen_at
        is_dead = now - silent_since > TAKEOVER_HEARTBEATS * heartbeat_seconds
        if holder is None or holder.session == session or is_dead:
            del self._asked[session]
            return None
        if member is None or member.seen_at <= asked_at + heartbeat_seconds:
            return control.WaitAnswer(holder=holder.session, host=holder.host, run_id=self._folder.run_id)
        process = f"process {member.heartbeat.pid} on {holder.host}"
        where = f"{replay.server_name(shard)} is already running: {process}"
        return self._refuse("shard", f"{where}; stop that process, or choose another --shard")

    def _refuse(self, reason: str, text: str) -> control.RefusedAnswer:
        self.refused[reason] += 1
        return control.RefusedAnswer(text)

    def _answer_heartbeat(self, heartbeat: control.AnyHeartbeat) -> control.Answer:
        if heartbeat.run_id != self._folder.run_id:
            return self._refuse("run", "the request is for another run")
        if isinstance(heartbeat, control.ActorHeartbeat):
            self.keep_scores(heartbeat.scores)  # also if another host has the ids now: these games were played
        if isinstance(heartbeat, control.ReplayHeartbeat) and self._fence.refuses(heartbeat):
            return self._refuse("fence", "another replay server has taken over this shard")
        pace = pace_of(len(self.state.members)) if heartbeat.role == Role.ACTOR else 1.0
        if not self._leases.renew(heartbeat.session, heartbeat.streams, self._clock(), pace):
            return self._refuse("streams", "the actor ids of this host were leased to another host")
        try:
            self.state.update(heartbeat)
        except ValueError as error:
            raise WireError("fields", str(error)) from error
        self.state.num_leased = self._leases.num_leased
        wanted = False
        if isinstance(heartbeat, control.ReplayHeartbeat):
            self._fence.note(heartbeat)
            wanted = self.state.members.inserts_wanted(heartbeat.shard)
        if isinstance(heartbeat, control.EvaluatorHeartbeat):
            answer = self.end_answer if self.state.finished else control.StateAnswer(False)
            return replace(answer, final=self.state.final)
        generation = self.state.members.generation if heartbeat.role == Role.ACTOR else 0
        if self.state.over:
            return self.end_answer
        return control.StateAnswer(False, inserts_wanted=wanted, generation=generation, pace=pace)

    # --- the trainer ------------------------------------------------------------------------------------------------

    def receive(self, message: FromTrainer) -> None:
        """Receives a message of the trainer."""
        match message:
            case TrainerStart():
                self.num_parameters, self._parameters = message.num_parameters, message.parameters
                self.state.restore(message.progress)
                self.state.updates_before = message.updates
                self.state.update_learner(LearnerStatus(updates=message.updates))
            case TrainerReport():
                self.state.update_learner(message.status)
            case TrainerEnd():
                self.state.end_training(message.end, message.final)

    def decide(self) -> News:
        """Decides whether the run should end; returns the news for the trainer."""
        state = self.state
        transport = self._config.transport
        # The trainer runs here, and this host may not resolve the name that others use for it.
        own, here = f"//{transport.advertise}:", f"//{local_host(transport)}:"
        replay = state.members.replay_endpoints
        endpoints = [{name: where.replace(own, here) for name, where in shard.items()} for shard in replay]
        return News(endpoints, state.waiting(), state.decide_end(), state.progress)

    # --- curves and scores ------------------------------------------------------------------------------------------

    def keep_scores(self, scores: Scores) -> None:
        """Keeps scores for the next row of the curves. Ignores ids that the run does not have."""
        known = [actor for actor in scores.actors if actor.actor_id < self._config.actor.num_actors]
        self._scores.add(Scores(known, scores.faults, self._known(scores.metrics)))
        self.state.num_episodes += sum(actor.games for actor in known)
        self.state.num_faults += scores.faults

    def keep_evaluation(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Keeps an evaluation, and its parameters if they are the best so far.

        Update 0 counts only if the run started from a trained policy: see `learner.init_from`.

        The first confirmed score ends the run. Later evaluations are ignored, because they must not replace that score:
        the evaluator continues until it learns of the end.
        """
        state = self.state
        if state.end and state.evaluation is not None and state.evaluation.confirmed:
            return
        if result.updates or self._config.learner.init_from:
            games, confirmed = games_of(result), result.confirmed
            state.best_score = self._best_policy.keep(result.mean, parameters, games, confirmed=confirmed)
        result = replace(result, metrics=self._known(result.metrics))
        state.keep_evaluation(result)
        state.decide_end()
        self._unwritten.append((result, state.best_score))
        if self._begin_curves():
            self._write_evaluations()

    def write_rows(self) -> None:
        """Adds the current figures to the curves. Call this once a second."""
        if self._begin_curves():
            self._write_evaluations()
            self._write_scores()
            for row in self._rows.next():
                self._metrics.accept(row)
            self._metrics.flush()

    def tick(self) -> None:
        """Updates the elapsed time, and forgets silent programs. Call this once a second."""
        self._folder.run_time = self.state.run_time
        longest = pace_of(len(self.state.members)) * self._config.transport.heartbeat_seconds
        self.state.members.forget_silent(max(FORGET_SECONDS, ABSENT_HEARTBEATS * longest))
        self._leases.expire(self._clock())

    def close(self) -> None:
        """Writes the last scores, and closes the files of the curves."""
        if self._begin_curves():
            self._write_evaluations()
            self._write_scores()
        self._metrics.close()

    def _known(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metrics with the first MAX_METRICS names that environments have reported in this start."""
        self._metric_names = list(dict.fromkeys([*self._metric_names, *metrics]))[:MAX_METRICS]
        return {name: metrics[name] for name in self._metric_names if name in metrics}

    def _write_evaluations(self) -> None:
        for result, best in self._unwritten:
            self._metrics.accept(evaluation_row(self.state.num_steps, result, best))
        self._unwritten.clear()

    def _write_scores(self) -> None:
        if (scores := self._scores.take(None)) is not None:
            self._metrics.accept(score_row(self.state, scores))

    def _begin_curves(self) -> bool:
        """Returns whether rows may be added to the curves. First removes the rows that a resumed run repeats.

        The number of steps is known when every replay server has reported its number of transitions.
        """
        state = self.state
        if not self._curves_began and (state.num_steps == 0 or state.members.all_replay_endpoints):
            self._curves_began = True
            self._metrics.begin(state.num_steps)
            cut_curves(self._folder.curves, state.num_steps, state.updates_before)
        return self._curves_began
