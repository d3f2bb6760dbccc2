"""What the coordinator knows of a run: what its programs say, how far it is, and why it should end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from apex.config import Config, ReplayConfig
from apex.dqn.exploration import epsilon_ladder
from apex.runs.bottleneck import PARTS, find_limit, find_limit_of_filling
from apex.runs.members import Members
from apex.transport.messages.control import AnyHeartbeat, ReplayHeartbeat
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.run_status import Bottleneck
from apex.transport.messages.status import LearnerStatus
from apex.transport.timing import TRAINER_SILENCE_SECONDS
from apex.types import Progress

log = logging.getLogger("apex")


class RunState:
    """Collects what every program says of itself and sums it up."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        folder: str,
        elapsed_seconds: float = 0.0,
        finds_bottleneck: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`elapsed_seconds`: how long the run had gone on when the learner was started again.

        `finds_bottleneck` is False where the parts of the run do not wait for each other.
        """
        self.members = Members(config, clock)
        self.learner: LearnerStatus | None = None  # None: the trainer has not reported yet
        self.evaluation: EvaluationResult | None = None  # the newest
        self.best_score: float | None = None
        self.refused_connections: dict[str, int] = {}  # by the coordinator's ZAP handler, by socket and reason
        self.refusals: dict[str, dict[str, int]] = {}  # by the learner's socket, by reason
        self.num_leased = 0
        self.num_episodes = 0  # games that actors have finished in this run
        self.reason = ""  # why the run ends; "" while it goes on
        self.finished = False
        self.steps = StepCounter(config.replay)
        self.config = config
        self.name = name
        self.folder = folder
        self._finds_bottleneck = finds_bottleneck
        actor = config.actor
        self.epsilons = epsilon_ladder(actor.num_actors, actor.epsilon_base, actor.epsilon_exponent).tolist()
        self._clock = clock
        self._started_at = clock() - elapsed_seconds
        self._trainer_heard_at = clock()

    def hear(self, heartbeat: AnyHeartbeat) -> None:
        """Notes a heartbeat; raises ValueError for one that cannot be."""
        self.members.hear(heartbeat)
        if isinstance(heartbeat, ReplayHeartbeat):
            status = heartbeat.status
            self.steps.count(heartbeat.shard, status.num_inserted, status.store_incarnation)

    def hear_trainer(self, status: LearnerStatus) -> None:
        """Notes what the learner's trainer says of itself, about once a second."""
        self.learner, self._trainer_heard_at = status, self._clock()

    def go_on(self, progress: Progress) -> None:
        """Counts on from where the run was when the learner was started."""
        self.steps.num_steps, self.num_episodes = progress.num_steps, progress.num_episodes
        self._started_at = self._clock() - progress.elapsed_seconds

    @property
    def num_steps(self) -> int:
        """Transitions that the replay servers have stored in this run."""
        return self.steps.num_steps

    @property
    def elapsed_seconds(self) -> float:
        """How long the run has gone on."""
        return self._clock() - self._started_at

    @property
    def progress(self) -> Progress:
        """How far the run is, in whole seconds."""
        return Progress(self.num_steps, self.num_episodes, int(self.elapsed_seconds))

    def end_reason(self) -> str:
        """Why the run should end now, in words; "" if it should not."""
        run, evaluation = self.config.run, self.evaluation
        score = evaluation.mean if evaluation is not None and evaluation.confirmed else -math.inf
        if run.stop_score is not None and score >= run.stop_score:
            return f"reached the score {run.stop_score:g}"
        if run.max_steps and self.num_steps >= run.max_steps:
            return f"reached {run.max_steps} steps"
        if run.max_minutes and self.elapsed_seconds >= 60 * run.max_minutes:
            return f"reached {run.max_minutes:g} minutes"
        return ""

    def judge(self) -> str:
        """Why the run ends, in words; "" while it goes on."""
        self.reason = self.reason or self.end_reason()
        return self.reason

    def scalars(self) -> dict[str, float]:
        """What the curves show of programs that send none themselves, by TensorBoard tag; and what limits the run."""
        scalars = {f"actors/{name}": value for name, value in self.actor_figures().items()}
        scalars |= {
            f"refused/{socket_name}": float(sum(counts.values())) for socket_name, counts in self.refusals.items()
        }
        bottleneck = self.bottleneck()
        if bottleneck is not None:
            scalars |= {f"limited_by/{part}": float(part == bottleneck.part) for part in PARTS}
        return scalars

    def bottleneck(self) -> Bottleneck | None:
        """Which part would make training faster, or begin sooner, if it were faster; and the setting to change."""
        if not self._finds_bottleneck:
            return None
        members, phase = self.members, self.phase
        silence = self._clock() - self._trainer_heard_at
        if phase == "training" and silence > TRAINER_SILENCE_SECONDS:
            why = f"no word from its trainer for {silence:.0f} s: one long update, or it is stuck"
            return Bottleneck("learner", why, "--run.stuck-seconds")
        if phase == "filling replay":
            return find_limit_of_filling(self.config, members.actors, members.replay, members.absent_replay)
        if phase == "training" and self.learner is not None:
            return find_limit(self.config, members.actors, members.replay, self.learner, members.absent_replay)
        return None

    @property
    def phase(self) -> str:
        """What the run is doing, in words."""
        if self.finished:
            return "finished"
        if self.reason:
            return "finishing"
        if not self.members.all_replay_endpoints:
            return "waiting for replay"
        return "training" if self.learner is not None and self.learner.updates else "filling replay"

    def actor_figures(self) -> dict[str, float]:
        """Of all actor hosts together; of the time they wait, the one that waits most. {} without hosts."""
        actors = self.members.actors
        if not actors:
            return {}
        return {
            "wait_share": max(actor.wait_share for actor in actors),
            "steps_per_second": sum(actor.steps_per_second for actor in actors),
            "parameter_bytes_per_second": sum(actor.parameter_bytes_per_second for actor in actors),
        }


class StepCounter:
    """Adds up what the stores of all shards have ever stored: a store that is made anew counts from 0 again."""

    def __init__(self, config: ReplayConfig) -> None:
        self.num_steps = 0  # transitions stored in this run
        self._config = config
        self._stores: dict[int, tuple[str, int]] = {}  # by shard: the store's incarnation, what it has counted
        self._steps_before = 0  # steps that the present stores do not count

    def count(self, shard: int, num_inserted: int, store_incarnation: str) -> None:
        """Steps go on where they were when a store is made anew, or begins with less than was stored before."""
        known, _ = self._stores.get(shard, ("", 0))
        self._stores[shard] = store_incarnation, num_inserted
        counted = sum(count for _, count in self._stores.values())
        if store_incarnation != known:
            if num_inserted == 0 < self.num_steps:
                name = self._config.shard_name(shard)
                log.warning("%s begins with an empty memory, although the run has %d steps", name, self.num_steps)
            self._steps_before = max(0, self.num_steps - counted)
        self.num_steps = max(self.num_steps, self._steps_before + counted)
