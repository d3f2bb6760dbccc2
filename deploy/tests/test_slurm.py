"""deploy/slurm/apex.sbatch on a real Slurm: a run learns, survives lost nodes and requeued jobs, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import SECONDS, wait_until
from slurm_cluster import SlurmCluster, missing

from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apexreplay.store.location import store_path
from chaos.audit import Follower, Verdict, judge
from chaos.ledger import LedgerReader

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(missing()), reason=missing())]
FILE = Path(__file__).parents[1] / "slurm/apex.sbatch"
ACTORS = set(range(8))
AGAIN_SECONDS = 120.0  # until the actor ids of a lost node have another one, on a busy machine
CALM = (
    "--preset cartpole --name calm --run.no-tensorboard --run.stop-score none --evaluator.no-enabled "
    "--replay.min-size-to-sample 300 --learner.batch-size 32 --checkpoint.period-seconds 2 --checkpoint.period 10 "
    "--env chaos.witness:make --replay.capacity 500000 --env-arg ledgers="
)


def submit(cluster: SlurmCluster, arguments: str, actor_options: str = "") -> str:
    """Submits a head with two CPUs, a whole node, and two actor hosts; returns the head's job id."""
    variables = f"ACTOR_TASKS=2 ACTOR_CPUS=1 ACTOR_ENVS=4 ACTOR_OPTIONS={actor_options}"
    return cluster.run(f"{variables} sbatch --parsable --cpus-per-task=2 {FILE} {arguments}").strip()


class Calm:
    """A run with little load, whose actors write ledgers."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        (ledgers := cluster.folder / "ledgers").mkdir()
        self._ledger = LedgerReader(ledgers)
        self.job = submit(cluster, f"{CALM}{ledgers}")
        self.until_actors_act(set())
        self.actors = next(job.partition("_")[0] for job in cluster.jobs() if "_" in job)
        self.folder = RunFolder.open(cluster.shared / "runs/calm")
        wait_until(lambda: any(self.updates()), "updates")

    def streams(self) -> set[tuple[int, int]]:
        """Returns all streams with an acknowledged segment so far: actor ids with their incarnations."""
        self._ledger.read()
        return {(actor, incarnation) for actor, incarnation, _ in self._ledger.entries.acknowledged}

    def until_actors_act(self, before: set[tuple[int, int]], seconds: float = SECONDS) -> None:
        """Waits until each actor id has a stream that is not in `before`."""
        wait_until(lambda: {actor for actor, _ in self.streams() - before} == ACTORS, "actors", seconds)

    def until_it_goes_on(self, before: set[tuple[int, int]]) -> None:
        """Waits for new streams and updates; fails if the run did not continue its saved state."""
        saved = newest_update(self.folder.checkpoints) or 0
        self.until_actors_act(before)
        wait_until(lambda: self.updates()[-1] > self.resumed() >= saved, "updates")
        assert self.updates() == sorted(self.updates())

    def nodes(self) -> tuple[str, str]:
        """Returns the nodes of the head and of the first actor host."""
        jobs = self._cluster.jobs()
        return jobs[self.job].node, jobs[f"{self.actors}_1"].node

    def restarts(self) -> int:
        """Returns how often the second actor host was requeued."""
        shown = self._cluster.run(f"scontrol --oneliner show job {self.actors}_2")
        return int(shown.partition(" Restarts=")[2].partition(" ")[0])

    def resumed(self) -> int:
        """Returns the update at which the learner has resumed last."""
        return int(self._cluster.log(self.job).rpartition("resumes at update ")[2].partition(", ")[0].replace(",", ""))

    def updates(self) -> list[int]:
        """Returns the updates of the rows of the learner's curve."""
        rows = read_curve(self.folder.path / "curves/learner.jsonl")
        return [row["scalars"]["learner/updates"] for row in rows if "learner/updates" in row["scalars"]]

    def audit(self, node: str) -> Verdict:
        """Compares the ledgers with the replay memory on the head's node."""
        self._ledger.read()
        acknowledged = dict(self._ledger.entries.acknowledged)
        path = self._cluster.machines[node].root / store_path(self.folder.run_id).relative_to("/")
        store = Follower(path, self.folder.schema)
        assert store.read()
        store.look_again()
        self._ledger.read()
        return judge(self._ledger.entries._replace(acknowledged=acknowledged), [store.content])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def calm(cluster: SlurmCluster) -> Calm:
    return Calm(cluster)


def test_cartpole_is_solved_through_three_nodes(cluster: SlurmCluster) -> None:
    job, nodes = submit(cluster, "--preset cartpole --name solved", "--exclusive"), set()

    def is_over() -> bool:
        jobs = cluster.jobs()
        nodes.update(job.node for job in jobs.values())
        return not jobs

    wait_until(is_over, "the end of the run")
    assert "reached the score 475" in cluster.log(job)
    evaluation = read_curve(cluster.shared / "runs/solved/curves/evaluator.jsonl")[-1]["scalars"]
    assert evaluation["evaluator/score"] >= 475
    assert nodes - {""} == {"node1", "node2", "node3"}
    assert not list(cluster.shared.rglob("*.key*"))


def test_the_ids_of_a_lost_node_are_leased_again_without_a_loss(cluster: SlurmCluster, calm: Calm) -> None:
    head, actors = calm.nodes()
    before = calm.streams()
    cluster.lose(actors)
    calm.until_actors_act(before, AGAIN_SECONDS)
    cluster.boot(actors)
    wait_until(lambda: cluster.run(f"sinfo --noheader --node={actors} --format=%T") == "idle\n", "the node again")
    assert calm.nodes()[1] not in (head, actors)
    verdict = calm.audit(head)
    assert verdict.acknowledged > 100
    assert verdict.passed, verdict.sentence()


def test_a_requeued_head_goes_on_elsewhere_with_the_same_actors(cluster: SlurmCluster, calm: Calm) -> None:
    """One actor host follows it; the other reaches its time limit meanwhile, of which the same signal tells it."""
    jobs, before, restarts, (head, _) = cluster.jobs().keys(), calm.streams(), calm.restarts(), calm.nodes()
    cluster.run(f"scontrol update nodename={head} state=drain reason=test; scontrol requeue {calm.job}")
    cluster.run(f"scancel --signal=TERM --batch {calm.actors}_2")
    calm.until_it_goes_on(before)
    cluster.run(f"scontrol update nodename={head} state=resume")
    assert cluster.jobs().keys() == jobs
    assert calm.nodes()[0] != head
    assert calm.restarts() > restarts


def test_a_head_waits_in_the_queue_again_at_its_time_limit(cluster: SlurmCluster, calm: Calm) -> None:
    jobs, before = cluster.jobs().keys(), calm.streams()
    cluster.run(f"scancel --signal=TERM --batch {calm.job}")
    calm.until_it_goes_on(before)
    assert cluster.jobs().keys() == jobs


def test_a_cancelled_head_saves_and_leaves_nothing(cluster: SlurmCluster, calm: Calm) -> None:
    update = calm.updates()[-1]
    cluster.run(f"scancel {calm.job}")
    wait_until(lambda: not cluster.jobs(), "an empty queue")
    assert (newest_update(calm.folder.checkpoints) or 0) >= update
    assert "keeping the memory" not in (calm.folder.logs / "replay.log").read_text(), "each end has saved it"
    assert not list(cluster.shared.rglob("*.key*"))
