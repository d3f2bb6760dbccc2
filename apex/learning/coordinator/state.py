"""The coordinator's view of a run: the status of its processes, its progress, and why it should end."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import get_args

from msgspec.structs import asdict

from apex.config import Config, ReplayConfig
from apex.facts import Bottleneck, EndReason, Part, Phase
from apex.learning.coordinator.bottleneck import find_absent, find_limit, find_other_programs, keep_feasible
from apex.learning.coordinator.members import Members
from apex.runtime.hardware import read_machine
from apex.runtime.resources import HostUse
from apex.transport.hello import host_name
from apex.transport.messages.control import AnyHeartbeat, ReplayHeartbeat
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.run_status import EvaluationRow
from apex.transport.messages.status import LearnerStatus, Resources
from apex.transport.timing import TRAINER_SILENCE_SECONDS
from apex.types import NO_TIME, Exploration, Progress, RunTime
from apexreplay.facts import Waiting

# A run whose actors never come ends this long after its limit of minutes at the latest. After as long, the end of a run
# does not wait for an evaluator that has not joined.
MAX_STARTUP_SECONDS = 120.0
MAX_EVALUATIONS = 32  # in a status; observers request it more often than these take

log = logging.getLogger("apex")


class RunState:
    """Collects the status messages of all processes of a run and summarizes them."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        folder: str,
        exploration: Exploration,
        run_time: RunTime = NO_TIME,
        finds_bottleneck: bool = True,
        num_cores: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`exploration`: how the actors explore (epsilon or noise). `run_time`: what the run had taken before the
        learner was started again.

        `finds_bottleneck`: False if the parts of the run do not wait for each other, as in one process. `num_cores` of
        the learner's host; 0: of this one.
        """
        self.members = Members(config, clock)
        self.learner: LearnerStatus | None = None  # None: the trainer has not reported yet
        self.learner_resources: Resources | None = None  # used by trainer, coordinator and loaders; None: not measured
        self.host_use: HostUse | None = None  # of the learner's host; None: not measured
        self.evaluation: EvaluationResult | None = None  # the newest result
        self.best_score: float | None = None
        self.evaluations: deque[EvaluationRow] = deque(maxlen=MAX_EVALUATIONS)  # the newest ones of this start
        self.refused_connections: dict[str, int] = {}  # counts by socket and reason, from the coordinator's ZAP handler
        self.refusals: dict[str, dict[str, int]] = {}  # messages refused by the learner: counts by socket and reason
        self.num_leased = 0
        self.num_episodes = 0  # games that actors have finished in this run
        self.num_faults = 0  # games that a fault of the environment ended, since the learner started
        self.end: EndReason | None = None  # why the run ends; None while it continues
        self.over = False  # whether training has ended
        self.final: int | None = None  # version of the parameters to evaluate after training; None: no evaluation
        self._final_until = 0.0
        self.steps = StepCounter(config.replay)
        self.config = config
        self.name = name
        self.folder = folder
        self.updates_before = 0  # updates of the run before this start of the learner
        self._finds_bottleneck = finds_bottleneck
        self._num_cores = num_cores or read_machine().cores
        self.exploration = exploration
        self._clock = clock
        self._began_at = clock()  # of this start
        self._started_at = self._began_at - run_time.seconds
        self._untrained_before = run_time.untrained
        self._trained_until: float | None = None  # None: training goes on
        self._first_step_at: float | None = None  # of this start; None: no transition has come
        self._steps_before = 0  # steps of the run before this start
        self._learner_seen_at = clock()

    def update(self, heartbeat: AnyHeartbeat) -> None:
        """Stores a heartbeat; raises ValueError if it is not valid."""
        self.members.update(heartbeat)
        if isinstance(heartbeat, ReplayHeartbeat):
            status = heartbeat.status
            self.count_steps(heartbeat.shard, status.num_inserted, status.num_steps, status.store_incarnation)

    def keep_evaluation(self, result: EvaluationResult) -> None:
        """Stores an evaluation; `best_score` includes it already."""
        self.evaluation = result
        row = EvaluationRow(
            number=self.evaluations[-1].number + 1 if self.evaluations else 1,
            updates=result.updates,
            steps=self.num_steps,
            score=result.mean,
            best=self.best_score,
            episodes=result.episodes,
        )
        self.evaluations.append(row)

    def count_steps(self, shard: int, num_inserted: int, num_steps: int, store_incarnation: str) -> None:
        """Records how many transitions or sequences the store of a shard has ever stored, and their steps."""
        self.steps.count(shard, num_inserted, num_steps, store_incarnation)
        if self._first_step_at is None and self.num_steps > self._steps_before:
            self._first_step_at = self._clock()

    def update_learner(self, status: LearnerStatus) -> None:
        """Stores the status that the learner's trainer sends about once a second."""
        self.learner, self._learner_seen_at = status, self._clock()

    def restore(self, progress: Progress) -> None:
        """Continues the run's counters and clock from `progress`, with which the learner resumes the run."""
        self.steps.num_steps, self.num_episodes = progress.num_steps, progress.num_episodes
        self._steps_before = progress.num_steps
        self._started_at = self._began_at - progress.elapsed_seconds
        self._untrained_before = max(self._untrained_before, progress.untrained_seconds)

    @property
    def num_steps(self) -> int:
        """The number of transitions that the replay servers have stored in this run."""
        return self.steps.num_steps

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the run has taken, over all its starts."""
        return self._clock() - self._started_at

    @property
    def untrained_seconds(self) -> float:
        """Seconds that do not count towards `run.max_minutes`: until the first transition, and the final evaluation.

        Of all starts of the run.
        """
        now = self._clock()
        first = now if self._first_step_at is None else self._first_step_at
        until = now if self._trained_until is None else self._trained_until
        startup = min(first - self._began_at, until - self._began_at, MAX_STARTUP_SECONDS)
        return self._untrained_before + startup + now - until

    @property
    def run_time(self) -> RunTime:
        """The time that the run has taken until now."""
        return RunTime(self.elapsed_seconds, self.untrained_seconds)

    @property
    def progress(self) -> Progress:
        """The numbers of steps, episodes and whole seconds of the run until now."""
        return Progress(self.num_steps, self.num_episodes, int(self.elapsed_seconds), int(self.untrained_seconds))

    def reached_limit(self) -> EndReason | None:
        """Returns the limit that the run has reached; None if it should continue."""
        run, evaluation = self.config.run, self.evaluation
        score = evaluation.mean if evaluation is not None and evaluation.confirmed else -math.inf
        if run.stop_score is not None and score >= run.stop_score:
            return EndReason("score", run.stop_score)
        if run.max_steps and self.num_steps >= run.max_steps:
            return EndReason("steps", run.max_steps)
        if run.max_minutes and self.elapsed_seconds - self.untrained_seconds >= 60 * run.max_minutes:
            return EndReason("minutes", run.max_minutes)
        return None

    def decide_end(self) -> EndReason | None:
        """Decides whether the run ends. The first reason stays. Returns None while the run continues."""
        self.end = self.end or self.reached_limit()
        return self.end

    def stop_clock(self) -> None:
        """From now on, the time does not count towards `run.max_minutes`."""
        if self._trained_until is None:
            self._trained_until = self._clock()

    def end_training(self, end: EndReason, final: int | None) -> None:
        """Records that training has ended. `final`: version of the last parameters if they are to be evaluated."""
        self.stop_clock()
        self.end = self.end or end
        has_score = self.evaluation is not None and self.evaluation.confirmed  # the score that ended the run
        self.over, self.final = True, None if has_score else final
        self._final_until = self._clock() + self.config.evaluator.final_seconds

    @property
    def finished(self) -> bool:
        """Whether training has ended and the run no longer waits for the score of the final policy.

        The wait ends when the policy is evaluated, after `evaluator.final_seconds`, or `MAX_STARTUP_SECONDS` after this
        start if no evaluator has joined: on a busy machine, an evaluator may join after a short training has ended.
        """
        if not self.over or self.final is None:
            return self.over
        now, evaluated = self._clock(), self.evaluation is not None and self.evaluation.updates == self.final
        may_come = self.members.has_evaluator or now < self._began_at + MAX_STARTUP_SECONDS
        return evaluated or not may_come or now >= self._final_until

    def scalars(self) -> dict[str, float]:
        """Returns metrics by TensorBoard tag: those of processes that send no metrics, and the bottleneck."""
        scalars = {f"actors/{name}": value for name, value in self.actor_figures().items()}
        scalars |= {f"refused/{name}": float(sum(counts.values())) for name, counts in self.refusals.items()}
        shards = [server.heartbeat.status for server in self.members.replay_servers.values()]
        refused = [self.refused_connections, *(shard.refused_connections for shard in shards)]
        scalars["refused/connections"] = float(sum(sum(counts.values()) for counts in refused))
        used = self.members.resources
        if self.learner_resources is not None:
            used["learner"] = self.learner_resources
        for role, resources in used.items():
            figures = {name: value for name, value in asdict(resources).items() if value is not None}
            scalars |= {f"{name}/{role}": float(value) for name, value in figures.items()}
        bottleneck = self.bottleneck()
        if bottleneck is not None:
            scalars |= {f"limited_by/{part}": float(part == bottleneck.part) for part in get_args(Part)}
        return scalars

    def bottleneck(self) -> Bottleneck | None:
        """Returns the part that limits training; None if unknown, as before the first update of this start."""
        if not self._finds_bottleneck or self.phase != "training" or self.learner is None:
            return None
        members, replay, silence = self.members, self.members.replay, self._clock() - self._learner_seen_at
        found: Bottleneck | None = None
        if silence > TRAINER_SILENCE_SECONDS:
            found = Bottleneck(part="learner", cause="silent_trainer", have=silence, increase=("run.stuck_seconds",))
        found = found or find_absent(members.actors, members.absent_replay)
        if found is None and self.host_use is not None:
            own = members.cores_on(host_name())
            own += self.learner_resources.cores if self.learner_resources is not None else 0.0
            found = find_other_programs(self.host_use, own)
        if found is None and replay is not None:
            found = find_limit(self.config, members.actors, self.num_leased, replay, self.learner)
        return found and keep_feasible(found, self.config, self._num_cores)

    def waiting(self) -> Waiting:
        """Returns what a trainer that has no batch waits for."""
        members, replay = self.members, self.config.replay.per_shard()
        if members.absent_replay:
            return Waiting("replay", members.absent_replay)
        for shard, server in members.replay_servers.items():
            status, name = server.heartbeat.status, self.config.replay.server_name(shard)
            if status.size < replay.min_size_to_sample:
                return Waiting("transitions", name, status.size, replay.min_size_to_sample)
            if status.samplers_wait_for == "inserts":
                return Waiting("inserts", name, need=replay.samples_per_insert)
        refused = self.learner.refused_batches if self.learner is not None else 0
        return Waiting("usable_batches", have=refused) if refused else Waiting("batches")

    @property
    def phase(self) -> Phase:
        """What the run is doing."""
        if self.finished:
            return "finished"
        if self.end or self.over:
            return "finishing" if self.final is None else "evaluating_final_policy"
        if not self.members.all_replay_endpoints:
            return "waiting_for_replay"
        trains = self.learner is not None and self.learner.updates > self.updates_before
        return "training" if trains else "filling_replay"

    def actor_figures(self) -> dict[str, float]:
        """Returns rates summed over all actor hosts, and the highest share of waiting time; {} without actor hosts."""
        actors = self.members.actors
        if not actors:
            return {}
        return {
            "wait_share": max(actor.wait_share for actor in actors),
            "steps_per_second": sum(actor.steps_per_second for actor in actors),
            "parameter_bytes_per_second": sum(actor.parameter_bytes_per_second for actor in actors),
        }


class StepCounter:
    """Counts the steps that the shards have ever stored, even if a store is created again and counts from 0."""

    def __init__(self, config: ReplayConfig) -> None:
        self.num_steps = 0  # steps stored in this run
        self._config = config
        self._stores: dict[int, tuple[str, int, int]] = {}  # shard -> incarnation, items and steps of its store
        self._steps_before = 0  # steps that are not in the counts of the present stores

    def count(self, shard: int, num_inserted: int, num_steps: int, store_incarnation: str) -> None:
        """Records the counts of a shard. The run's steps never decrease, even if a new store has fewer."""
        known, before, _ = self._stores.get(shard, ("", 0, 0))
        self._stores[shard] = store_incarnation, num_inserted, num_steps
        counted = sum(count for _, _, count in self._stores.values())
        if store_incarnation != known:
            name = self._config.server_name(shard)
            if num_inserted < before:
                log.warning("%s lacks at least %d acknowledged transitions", name, before - num_inserted)
            elif num_inserted == 0 < self.num_steps:
                log.warning("%s starts with an empty memory, although the run has %d steps", name, self.num_steps)
            self._steps_before = max(0, self.num_steps - counted)
        self.num_steps = max(self.num_steps, self._steps_before + counted)
