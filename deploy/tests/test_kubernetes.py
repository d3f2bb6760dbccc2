"""The manifests of deploy/kubernetes: Kubernetes accepts them, and their containers train as written.

There is one run, in which an actor pod is lost, another is drained, and then the head's pod is lost with its folder.
The tests of it are its steps, in this order.
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
from typing import Any

import namespaces
import pytest
import yaml
from namespaced_run import Memory, check_continuation, read_memory, read_rows, renewed
from namespaces import SECONDS
from pods import Jobs, decide

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
OFTEN = "\\1--checkpoint.period-seconds=2\n"
AGAIN_SECONDS = 120.0  # until the actor ids of a dead pod have another one, on a busy machine
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


def test_only_the_head_gets_the_credentials_of_the_mirror(tmp_path):
    containers = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in build(tmp_path / "manifests", {})
        if each["kind"] == "Job"
    }
    sources = {name: [kind for source in one["envFrom"] for kind in source] for name, one in containers.items()}
    assert {name: [k for k in kinds if k.endswith("Ref")] for name, kinds in sources.items()} == {
        "apex-head": ["configMapRef", "secretRef"],
        "apex-actors": ["configMapRef"],
    }


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
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=SECONDS)
        secrets += [yaml.safe_load(done.stdout)] if is_secret else []
    return secrets


class Run:
    """The run of the pods, which has no stop score at first."""

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        self._folder, self._jobs = folder, jobs
        jobs.apply(*make_secrets(folder), *build(folder / "first", VALUES, arguments=f"{OFTEN}\\1--stop-score=none\n"))
        jobs.reconcile()
        jobs.wait_until(lambda: jobs.pods[HEAD].probe("startupProbe"), "the startup probe")
        jobs.wait_until(lambda: self.status().updates, "updates")  # The memory exists then.
        jobs.wait_until(lambda: all(one.contiguous for one in self.memory().streams), "experience of all")

    @property
    def path(self) -> Path:
        """Returns the run folder of the head."""
        return self._jobs.pods[HEAD].folder / "work/runs" / NAME

    def memory(self) -> Memory:
        return read_memory(self._jobs.pods[HEAD].root, self.path)

    def status(self) -> RunStatus:
        head = self._jobs.pods[HEAD]
        endpoint, keys = TransportConfig().endpoint("control", head.address), Keys(self._folder / "keys", "observer")
        found = head.within(lambda: ask(endpoint, SECONDS, keys))
        assert found is not None, self._jobs.logs()
        return found

    def are_leased(self) -> bool:
        actors = self.status().actors
        return actors.leased == actors.configured

    def mirrored(self) -> int:
        """Returns the update of the mirrored checkpoint."""
        newest = self._folder / "mirror" / NAME / "checkpoints/newest.json"
        return int(json.loads(newest.read_text())["num_updates"]) if newest.exists() else 0

    def until_renewed(self, before: Memory, seconds: float = SECONDS) -> Memory:
        """Waits until the streams of one pod have a new incarnation."""
        self._jobs.wait_until(lambda: len(renewed(before, self.memory())) == PER_POD, "a new pod's experience", seconds)
        return self.memory()

    def go_on_to_the_score(self) -> None:
        """Changes the manifests, which have an effect on new pods."""
        self._jobs.apply(*build(self._folder / "second", VALUES, arguments=OFTEN))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    if MISSING:
        pytest.skip(MISSING)
    with Jobs(tmp_path_factory.mktemp("kubernetes")) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def run(jobs: Jobs) -> Run:
    return Run(jobs.folder, jobs)


def test_a_pod_has_only_the_keys_of_its_role(jobs: Jobs, run: Run) -> None:
    for key in ACTORS:
        names = {path.name for path in (jobs.pods[key].root / "dev/shm/keys").iterdir()}
        assert names == {"actor.key_secret", "learner.key", "replay.key"}


def test_a_probe_succeeds_only_where_a_learner_answers(jobs: Jobs, run: Run) -> None:
    head = jobs.pods[HEAD]
    assert head.probe("livenessProbe")
    assert not jobs.pods[ACTORS[0]].probe("livenessProbe", head)


def test_actor_ids_of_a_lost_pod_are_leased_again_and_nothing_is_lost(jobs: Jobs, run: Run) -> None:
    before = run.memory()
    jobs.pods[ACTORS[1]].kill()
    after = run.until_renewed(before, AGAIN_SECONDS)
    jobs.wait_until(run.are_leased, "all ids to be leased")
    dead = renewed(before, after)
    assert after.incarnation == before.incarnation
    assert after.num_inserted > before.num_inserted
    pairs = enumerate(zip(before.streams, after.streams, strict=True))
    assert all(new.contiguous >= old.contiguous for actor_id, (old, new) in pairs if actor_id not in dead)
    jobs.pods[ACTORS[0]].terminate()
    run.until_renewed(after)


def test_a_new_head_continues_from_the_mirror_and_solves_the_run(jobs: Jobs, run: Run) -> None:
    """Actor pods end with 0 only when the run is over."""
    jobs.wait_until(run.mirrored, "a checkpoint in the mirror")
    run.go_on_to_the_score()
    rows, lost = read_rows(run.path / "curves/learner.jsonl"), jobs.pods[HEAD]
    lost.kill()
    resumed_at = run.mirrored()
    jobs.wait_until(lambda: jobs.pods[HEAD] is not lost, "another head")
    folder = run.path
    jobs.wait_until(lambda: 0 in jobs.statuses[HEAD], "the end of the run")
    jobs.wait_until(lambda: all(0 in jobs.statuses[key] for key in ACTORS), "the end of the actors")
    assert RunFolder.open(folder).end == EndReason("score", 475.0)
    check_continuation(rows, read_rows(folder / "curves/learner.jsonl"), resumed_at)
    assert jobs.statuses[HEAD] == [137, 0]
    drained, killed = (jobs.statuses[key] for key in ACTORS)
    assert (drained[0], killed[0]) == (75, 137)
    # An actor pod follows the head to its new address. If the head was away for too long, the pod ends with 75.
    assert all(set(statuses[1:-1]) <= {75} and statuses[-1] == 0 for statuses in (drained, killed)), jobs.statuses
