"""What a run is doing, in one JSON object: kept by the coordinator, shown by the live view and `apex status`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from apex.config import Config
from apex.dqn.exploration import epsilon_ladder
from apex.runs.bottleneck import figure, find_limit, find_limit_of_filling
from apex.runs.members import Member, Status
from apex.types import Progress

if TYPE_CHECKING:
    from apex.runs.metrics.writer import MetricRow

log = logging.getLogger("apex")

PARTS = ("actors", "wire", "replay", "loaders", "learner", "processor")  # what may limit a run
TRAINER_SILENCE_SECONDS = 10.0  # after which it is what limits the run, whatever the last figures were
LEARNER_FIGURES = (
    "loss",
    "mean_q",
    "gradient_norm",
    "td_error",
    "wait_share",
    "loader_busy_share",
    "skipped_updates",
    "dormant_share",
    "learning_rate",
)
EPISODES = "actors/episodes"  # the tag of games that were finished since the message before
MAX_MEMBERS = 2_000  # who is known; more cannot all be real
MAX_ROWS = 300  # who is shown: three texts each of at most 800 bytes must fit into an answer, see header.MAX_JSON_BYTES
MAX_REASONS = 64  # why connections or messages were refused: of each at most 820 bytes
ABSENT_HEARTBEATS = 3  # a replay server that is silent for so many is away


class RunStatus:
    """Collects what every program says of itself and sums it up."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        folder: str,
        num_actors: int,
        elapsed_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`elapsed_seconds`: how long the run had gone on when the learner was started again."""
        self.members: dict[int, Member] = {}  # by session
        self.replay_endpoints: list[dict[str, str]] = [{} for _ in range(config.replay.num_shards)]  # by shard
        self.learner: Status = {}
        self.evaluation: Status = {}
        self.refused_connections: dict[str, int] = {}  # by the coordinator's authenticator, by socket and reason
        self.num_leased = 0
        self.num_steps = 0  # transitions that the replay server has stored in this run
        self.reason = ""  # why the run ends; "" while it goes on
        self.finished = False
        self.refusals: dict[str, dict[str, int]] = {}  # by the learner's socket, by reason
        self._stores: dict[int, tuple[object, int]] = {}  # by shard: the store's incarnation, what it has counted
        self._steps_before = 0  # steps that the present stores do not count
        self._config = config
        self._name = name
        self._folder = folder
        self._num_actors = num_actors
        actor = config.actor
        self._epsilons = epsilon_ladder(num_actors, actor.epsilon_base, actor.epsilon_exponent)
        self._clock = clock
        self._started_at = clock() - elapsed_seconds
        self._trainer_heard_at = clock()
        self.num_episodes = 0  # games that actors have finished in this run

    def hear(self, session: int, role: str, host: str, pid: int, status: Status, shard: int = 0) -> None:
        """Notes a heartbeat; raises ValueError for one program too many."""
        if session not in self.members and len(self.members) >= MAX_MEMBERS:
            raise ValueError(f"{MAX_MEMBERS} programs are here already")
        self.members[session] = Member(role, host, pid, self._clock(), shard, status)
        is_shard = role == "replay" and 0 <= shard < self._config.replay.num_shards
        if is_shard and "num_inserted" in status:
            self._count(shard, int(status["num_inserted"]), status.get("store_incarnation"))

    def go_on(self, progress: Progress) -> None:
        """Counts on from where the run was when the learner was started."""
        self.num_steps, self.num_episodes = progress.num_steps, progress.num_episodes
        self._started_at = self._clock() - progress.elapsed_seconds

    def count_episodes(self, row: MetricRow) -> None:
        """Counts the games that an actor has finished since its row before; replaces them by the run's games."""
        count = row["scalars"].get(EPISODES)
        if isinstance(count, int) and 0 <= count < 2**31:
            self.num_episodes += count
            row["scalars"] = {**row["scalars"], EPISODES: self.num_episodes}

    def _count(self, shard: int, num_inserted: int, store_incarnation: object) -> None:
        """Steps go on where they were when a store is made anew, or begins with less than was stored before."""
        known, _ = self._stores.get(shard, (None, 0))
        self._stores[shard] = store_incarnation, num_inserted
        counted = sum(count for _, count in self._stores.values())
        if store_incarnation != known:
            if num_inserted == 0 < self.num_steps:
                name = self._config.replay.shard_name(shard)
                log.warning("%s begins with an empty memory, although the run has %d steps", name, self.num_steps)
            self._steps_before = max(0, self.num_steps - counted)
        self.num_steps = max(self.num_steps, self._steps_before + counted)

    def forget(self, session: int) -> None:
        """Notes a goodbye."""
        self.members.pop(session, None)

    def forget_silent(self, seconds: float) -> None:
        """Forgets who has not been heard for so long."""
        now = self._clock()
        self.members = {s: member for s, member in self.members.items() if now - member.seen_at < seconds}

    # --- the replay shards ------------------------------------------------------------------------------------------

    def replay_server(self, shard: int) -> tuple[int, Member] | None:
        """Session and member of the shard's server that was heard last: one that was killed is here for a while."""
        servers = [(s, m) for s, m in self.members.items() if m.role == "replay" and m.shard == shard]
        return max(servers, key=lambda server: server[1].seen_at, default=None)

    @property
    def all_replay_endpoints(self) -> list[dict[str, str]]:
        """Endpoints by name of each shard; empty before all of them have said hello."""
        return self.replay_endpoints if all(self.replay_endpoints) else []

    @property
    def absent_replay(self) -> str:
        """Whom the run waits for: shards whose server has not said hello, or was not heard for a while; or ""."""
        silence = ABSENT_HEARTBEATS * self._config.transport.heartbeat_seconds
        replay, absent = self._config.replay, []
        for shard in range(replay.num_shards):
            server = self.replay_server(shard)
            if server is None or self._clock() - server[1].seen_at > silence:
                absent.append(replay.shard_name(shard))
        return ", ".join(absent)

    def inserts_wanted(self, shard: int) -> bool:
        """Whether samplers of another shard wait for inserts: those into this one must not wait for samples then.

        A batch has a part from each shard, so these samples would not come before those inserts; and they may be those
        of an actor process that is paused because of this shard.
        """
        return any(
            server[1].status.get("samplers_wait_for") == "inserts"
            for other in range(self._config.replay.num_shards)
            if other != shard and (server := self.replay_server(other)) is not None
        )

    def replay_status(self) -> Status:
        """What the servers of all shards say of themselves: sums, and what holds one of them holds all."""
        servers = [self.replay_server(shard) for shard in range(self._config.replay.num_shards)]
        statuses = [server[1].status for server in servers if server is not None]
        whole: Status = {}
        for status in statuses:
            for name, value in status.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    whole[name] = whole.get(name, 0) + value
        if "num_inserted" in whole:
            whole["samples_per_insert"] = whole.get("num_drawn", 0) / max(whole["num_inserted"], 1)
        if "busy_share" in whole:
            whole["busy_share"] = max(figure(status, "busy_share") for status in statuses)
        waits = [status.get("samplers_wait_for", "") for status in statuses]
        whole["samplers_wait_for"] = "inserts" if "inserts" in waits else ""
        whole["priority_histograms"] = [each for status in statuses if (each := status.get("priority_histogram"))]
        whole["refused_connections"] = [status.get("refused_connections") for status in statuses]
        whole["refusals"] = dict(sum((Counter(status.get("refusals", {})) for status in statuses), Counter()))
        whole["inserts_wait"] = any(status.get("inserts_wait") for status in statuses)
        return whole

    @property
    def elapsed_seconds(self) -> float:
        """How long the run has gone on."""
        return self._clock() - self._started_at

    def end_reason(self) -> str:
        """Why the run should end now, in words; "" if it should not."""
        run = self._config.run
        score = float(self.evaluation.get("mean", "-inf"))
        if run.stop_score is not None and self.evaluation.get("confirmed") and score >= run.stop_score:
            return f"reached the score {run.stop_score:g}"
        if run.max_steps and self.num_steps >= run.max_steps:
            return f"reached {run.max_steps} steps"
        if run.max_minutes and self.elapsed_seconds >= 60 * run.max_minutes:
            return f"reached {run.max_minutes:g} minutes"
        return ""

    def report(self, latest: Callable[[str], float | None]) -> Status:
        """The status object; `latest` gives the newest value of a metric by its tag."""
        config, replay, learner, evaluation = self._config, self.replay_status(), self.learner, self.evaluation
        highest = self._num_actors - 1
        shown = list(islice(self.members.values(), MAX_ROWS))  # Who has been here longest: a flood hides nobody.
        return {
            "run": self._name,
            "folder": self._folder,
            "environment": config.environment.id,
            "elapsed_seconds": self.elapsed_seconds,
            "phase": self._phase(),
            "reason": self.reason,
            "steps": self.num_steps,
            "steps_per_second": replay.get("inserts_per_second"),
            "updates": learner.get("updates", 0),
            "updates_per_second": learner.get("updates_per_second"),
            "samples_per_second": learner.get("samples_per_second"),
            "policy_lag": learner.get("policy_lag"),
            "replay": {
                "size": replay.get("size"),
                "capacity": config.replay.capacity,
                "min_size": config.replay.min_size_to_sample,
                "bytes": replay.get("bytes"),
                "max_bytes": replay.get("max_bytes"),
                "inserts_per_second": replay.get("inserts_per_second"),
                "samples_per_second": replay.get("samples_per_second"),
                "samples_per_insert": replay.get("samples_per_insert"),
                "stale_priorities": replay.get("stale_priorities"),
                "busy_share": replay.get("busy_share"),
            },
            "actors": {
                "configured": self._num_actors,
                "leased": self.num_leased,
                "highest_id": highest,
                "highest_epsilon": float(self._epsilons[highest]),
                "score": latest("actor_highest_id/score"),
                "mean_score": latest("actors/mean_score"),
                "episodes": latest("actors/episodes"),
                **self._actor_figures(),
            },
            "learner": {name: learner.get(name) for name in LEARNER_FIGURES},
            "evaluator": {
                "score": evaluation.get("mean"),
                "best": evaluation.get("best"),
                "episodes": evaluation.get("episodes"),
                "updates": evaluation.get("updates"),
            },
            "limits": {
                "steps": config.run.max_steps,
                "updates": config.run.max_updates,
                "minutes": config.run.max_minutes,
                "score": config.run.stop_score,
            },
            "limited_by": self.limited_by(),
            "refused_connections": _merged([self.refused_connections, *replay["refused_connections"]]),
            "refusals": {
                "replay": _merged([replay["refusals"]]),
                "batches": {"refused": learner.get("refused_batches", 0)},
                **self.refusals,
            },
            "roles": [self._row(member) for member in sorted(shown, key=lambda m: (m.role, m.shard, m.host))],
            "more_roles": len(self.members) - len(shown),
        }

    def _phase(self) -> str:
        if self.finished:
            return "finished"
        if self.reason:
            return "finishing"
        if not self.all_replay_endpoints:
            return "waiting for replay"
        return "training" if self.learner.get("updates") else "filling replay"

    def _row(self, member: Member) -> Status:
        return {
            "role": member.role,
            **({"shard": member.shard} if member.role == "replay" else {}),
            "host": member.host,
            "pid": member.pid,
            "last_seen_seconds": self._clock() - member.seen_at,
            "rate": member.status.get("rate"),
            "waiting": member.status.get("waiting"),
        }

    def scalars(self) -> dict[str, float]:
        """What the curves show of programs that send none themselves, by TensorBoard tag; and what limits the run."""
        scalars = {f"actors/{name}": value for name, value in self._actor_figures().items()}
        scalars |= {
            f"refused/{socket_name}": float(sum(counts.values())) for socket_name, counts in self.refusals.items()
        }
        limit = self.limited_by()
        if limit is not None:
            scalars |= {f"limited_by/{part}": float(part == limit["part"]) for part in PARTS}
        return scalars

    def _actor_figures(self) -> dict[str, float]:
        """Of all actor hosts together; of the time they wait, the one that waits most. {} without hosts."""
        actors = [member.status for member in self.members.values() if member.role == "actor"]
        if not actors:
            return {}
        summed = ("steps_per_second", "parameter_bytes_per_second")
        return {
            "wait_share": max(figure(actor, "wait_share") for actor in actors),
            **{name: sum(figure(actor, name) for actor in actors) for name in summed},
        }

    def limited_by(self) -> Status | None:
        """Which part would make training faster, or begin sooner, if it were faster; and the setting to change."""
        actors = [member.status for member in self.members.values() if member.role == "actor"]
        if self._phase() == "filling replay":
            return find_limit_of_filling(self._config, actors, self.replay_status(), self.absent_replay)
        if self._phase() != "training":
            return None
        if self.trainer_silence > TRAINER_SILENCE_SECONDS:
            why = f"no word from its trainer for {self.trainer_silence:.0f} s: one long update, or it is stuck"
            return {"part": "learner", "why": why, "setting": "--run.stuck-seconds"}
        return find_limit(self._config, actors, self.replay_status(), self.learner, self.absent_replay)

    def hear_trainer(self, report: Status) -> None:
        """Notes what the learner's trainer says of itself, about once a second."""
        self.learner.update(report)
        self._trainer_heard_at = self._clock()

    @property
    def trainer_silence(self) -> float:
        """Seconds since the trainer reported."""
        return self._clock() - self._trainer_heard_at


def _merged(counts: Iterable[object]) -> dict[str, int]:
    """Counts by name, added up: the MAX_REASONS greatest."""
    whole: Counter[str] = Counter()
    for each in counts:
        if isinstance(each, dict):  # It came by a socket.
            whole.update({str(name): count for name, count in each.items() if isinstance(count, int)})
    return dict(whole.most_common(MAX_REASONS))
