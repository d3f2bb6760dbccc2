"""The manifests of deploy/kubernetes: Kubernetes accepts them, and their containers train as written.

There is one run, in which an actor pod is lost, another is drained, and then the head's pod is lost with its folder.
Each test checks one property of it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import namespaces
import pytest
import yaml
from namespaced_run import Row, check_continuation, read_rows, renewed
from namespaces import Stopwatch
from pods import Jobs, decide
from stored_streams import Memory, read_memory

from apex.config import TransportConfig
from apex.facts import EndReason
from apex.launch.status import ask
from apex.runs.folder import RunFolder
from apex.transport.curve.key_store import Keys
from apex.transport.messages.run_status import RunStatus
from apexreplay.errors import FAILED, HOPELESS, NEIGHBOUR_GONE, REFUSED

MANIFESTS = Path(__file__).parents[1] / "kubernetes"
NAME, HEAD, ACTORS = "cartpole-1", ("apex-head", 0), [("apex-actors", 0), ("apex-actors", 1)]
VALUES = {"NAME": NAME, "PRESET": "cartpole", "MIRROR": "/mnt/mirror", "ACTORS": "4", "PROCESSES": "1", "ENVS": "2"}
PER_POD = 2
LEASE_SECONDS = 45.0  # until the actor ids of a dead pod are leased again
BUSY_SECONDS, RUN_SECONDS = 120.0, 400.0  # deadlines of waits, measured by a Stopwatch
MISSING = namespaces.missing()
GUIDE = (Path(__file__).parents[2] / "docs/guide/kubernetes.md").read_text()
pytestmark = [
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
    pytest.mark.timeout(2400),
]


def build(folder: Path, values: dict[str, str], *, components: str = "", arguments: str = "") -> list[dict[str, Any]]:
    """Returns the manifests after changes of a user: values, components, two actor pods, arguments of the head."""
    shutil.copytree(MANIFESTS, folder)
    edits = [("kustomization.yaml", rf"- {name}=\S*", f"- {name}={value}") for name, value in values.items()]
    edits += [
        ("kustomization.yaml", r"components: \[\]", f"components: [{components}]"),
        ("actors.yaml", r"(completions|parallelism): 4", r"\1: 2"),
        ("head.yaml", r"( +- )--head\n", rf"\1--head\n{arguments}"),
    ]
    for file, pattern, text in edits:
        before = (folder / file).read_text()
        after, count = re.subn(pattern, text, before)
        assert count, (file, pattern)
        (folder / file).write_text(after)
    command = ["kubectl", "kustomize", str(folder)]
    return list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def validate(folder: Path, objects: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Validates manifests against the schema of Kubernetes, which refuses unknown fields."""
    (folder / "built.yaml").write_text(yaml.dump_all(objects))
    command = ["kubernetes-validate", "--strict", str(folder / "built.yaml")]
    return subprocess.run(command, capture_output=True, text=True)


needs_validator = pytest.mark.skipif(
    not shutil.which("kubernetes-validate"), reason="kubernetes-validate is not installed"
)


@needs_validator
@pytest.mark.parametrize("components", ["", "gpu, volume, kueue"])
def test_kubernetes_accepts_the_manifests(tmp_path, components):
    objects = build(tmp_path / "run", {}, components=components)
    done = validate(tmp_path, objects)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") == len(objects)
    for spec in [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Job"]:
        assert all(len(volume) == 2 for volume in spec["volumes"]), "a volume has a name and one source"


@needs_validator
def test_kubernetes_refuses_an_unknown_field(tmp_path):
    objects = build(tmp_path / "run", {})
    objects[-1]["spec"]["podFailurePolicy"]["rule"] = []
    assert validate(tmp_path, objects).returncode


@pytest.mark.parametrize(
    ("status", "action"), [(REFUSED, "FailJob"), (HOPELESS, "FailJob"), (NEIGHBOUR_GONE, "Ignore"), (FAILED, "Count")]
)
def test_the_jobs_follow_the_exit_statuses(tmp_path, status, action):
    jobs = [one for one in build(tmp_path / "run", {}) if one["kind"] == "Job"]
    assert [decide(job, status) for job in jobs] == [action, action]


def make_secrets(folder: Path) -> list[dict[str, Any]]:
    """Makes keys and Secrets in the folder with the commands of the guide, except those that need a cluster."""
    secrets = []
    for line in re.findall(r"^(?:apex keys|kubectl create) .*$", GUIDE, re.MULTILINE):
        words = shlex.split(line)
        is_secret = words[0] == "kubectl"
        command = [*words, "--dry-run=client", "-o", "yaml"] if is_secret else [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=BUSY_SECONDS)
        secrets += [yaml.safe_load(done.stdout)] if is_secret else []
    return secrets


class Seen(NamedTuple):
    """What was observed of the run."""

    folder: Path  # the run at its end
    probes: dict[str, bool]  # results of the head's probe, in the head's pod and in a pod without a learner
    keys: dict[str, set[str]]  # names of the key files in each pod
    before: Memory  # before the loss of an actor pod
    after: Memory  # when its ids had new experience
    seconds: float  # from the loss until all ids were leased again, by a Stopwatch
    rows: list[Row]  # the learner's curve on the lost head
    resumed_at: int  # update of the mirrored checkpoint
    statuses: dict[tuple[str, int], list[int]]  # exit statuses of all pods


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The whole run. Every wait has a deadline, and all pods end in any case."""
    if MISSING:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("kubernetes")
    with Jobs(folder) as jobs:
        yield observe(folder, jobs)


def observe(folder: Path, jobs: Jobs) -> Seen:
    """Starts the run without a stop score, loses pods, and continues it until it is solved."""
    secrets = make_secrets(folder)
    often = "\\1--checkpoint.period-seconds=2\n"
    jobs.apply(*secrets, *build(folder / "first", VALUES, arguments=f"{often}\\1--stop-score=none\n"))
    jobs.reconcile()

    def run() -> Path:
        return jobs.pods[HEAD].folder / "work/runs" / NAME

    def memory() -> Memory:
        return read_memory(jobs.pods[HEAD].root, run())

    def status() -> RunStatus:
        head = jobs.pods[HEAD]
        endpoint, keys = TransportConfig().endpoint("control", head.address), Keys(folder / "keys", "observer")
        found = head.within(lambda: ask(endpoint, BUSY_SECONDS, keys))
        assert found is not None, jobs.logs()
        return found

    def is_leased() -> bool:
        return status().actors.leased == status().actors.configured

    def mirrored() -> int:
        newest = folder / "mirror" / NAME / "checkpoints/newest.json"
        return int(json.loads(newest.read_text())["num_updates"]) if newest.exists() else 0

    jobs.wait_until(lambda: jobs.pods[HEAD].probe("startupProbe"), "the startup probe", RUN_SECONDS)
    jobs.wait_until(lambda: status().updates, "updates", RUN_SECONDS)  # The memory exists then.
    jobs.wait_until(lambda: all(one.contiguous for one in memory().streams), "experience of all", RUN_SECONDS)
    head, other = jobs.pods[HEAD], jobs.pods[ACTORS[0]]
    probes = {"head": head.probe("livenessProbe"), "elsewhere": other.probe("livenessProbe", head)}
    keys = {key[0]: {path.name for path in (pod.root / "dev/shm/keys").iterdir()} for key, pod in jobs.pods.items()}

    before, watch = memory(), Stopwatch()
    jobs.pods[ACTORS[1]].kill()
    jobs.wait_until(lambda: not is_leased(), "the lost pod's leases to end", BUSY_SECONDS)
    jobs.wait_until(is_leased, "all ids to be leased", BUSY_SECONDS)
    seconds = watch.read()
    jobs.wait_until(lambda: len(renewed(before, memory())) == PER_POD, "the new pod's experience", BUSY_SECONDS)
    after = memory()
    jobs.pods[ACTORS[0]].terminate()
    jobs.wait_until(lambda: len(renewed(after, memory())) == PER_POD, "a pod for the drained one", BUSY_SECONDS)

    jobs.wait_until(mirrored, "a checkpoint in the mirror", BUSY_SECONDS)
    jobs.apply(*build(folder / "second", VALUES, arguments=often))
    rows, lost = read_rows(run() / "curves/learner.jsonl"), jobs.pods[HEAD]
    lost.kill()
    resumed_at = mirrored()
    jobs.wait_until(lambda: jobs.pods[HEAD] is not lost, "another head", BUSY_SECONDS)
    found = run()
    jobs.wait_until(lambda: 0 in jobs.statuses[HEAD], "the end of the run", RUN_SECONDS)
    jobs.wait_until(lambda: all(0 in jobs.statuses[key] for key in ACTORS), "the end of the actors", BUSY_SECONDS)
    return Seen(found, probes, keys, before, after, seconds, rows, resumed_at, jobs.statuses)


def test_the_run_is_solved_by_the_pods(seen: Seen) -> None:
    assert RunFolder.open(seen.folder).end == EndReason("score", 475.0)


def test_a_pod_has_only_the_keys_of_its_role(seen: Seen) -> None:
    assert seen.keys["apex-actors"] == {"actor.key_secret", "learner.key", "replay.key"}


def test_a_probe_succeeds_only_where_a_learner_answers(seen: Seen) -> None:
    assert seen.probes == {"head": True, "elsewhere": False}


def test_actor_ids_of_a_lost_pod_are_leased_again_and_nothing_is_lost(seen: Seen) -> None:
    dead = renewed(seen.before, seen.after)
    assert (seen.seconds < LEASE_SECONDS, len(dead)) == (True, PER_POD), seen.seconds
    assert seen.after.incarnation == seen.before.incarnation
    assert seen.after.num_inserted > seen.before.num_inserted
    pairs = enumerate(zip(seen.before.streams, seen.after.streams, strict=True))
    assert all(new.contiguous >= old.contiguous for actor_id, (old, new) in pairs if actor_id not in dead)


def test_a_new_head_continues_from_the_mirror(seen: Seen) -> None:
    assert seen.resumed_at > 0
    check_continuation(seen.rows, read_rows(seen.folder / "curves/learner.jsonl"), seen.resumed_at)


def test_actor_pods_end_with_0_only_when_the_run_is_over(seen: Seen) -> None:
    assert seen.statuses[HEAD] == [137, 0]
    drained, killed = (seen.statuses[key] for key in ACTORS)
    assert (drained[0], killed[0]) == (75, 137)
    # An actor pod follows the head to its new address. If the head was away for too long, the pod ends with 75.
    assert all(set(statuses[1:-1]) <= {75} and statuses[-1] == 0 for statuses in (drained, killed)), seen.statuses
