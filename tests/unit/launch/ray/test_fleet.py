"""What the driver makes of what Ray says: units that wait, come, go, and end. Ray is played by this file."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest

from apex.config import Config
from apex.errors import FAILED, FINISHED, HOPELESS, NEIGHBOUR_GONE, REFUSED
from apex.launch.ray import fleet
from apex.launch.ray.driver import begin, plan
from apex.launch.ray.options import RayEngine
from apex.transport.curve.command import new_folder
from apex.version import VERSION


class RayError(Exception):
    pass


class UnavailableError(RayError):
    pass


class Reference:
    """What a call returns: a value or an exception once it is `set`."""

    value = None


class Handle:
    """A unit; the last call of each method is kept."""

    def __init__(self):
        self.calls = {}
        self.killed = False

    def __getattr__(self, name):
        def remote(*arguments):
            self.calls[name] = Reference()
            self.calls[name].arguments = arguments
            return self.calls[name]

        return types.SimpleNamespace(remote=remote)


class Ray:
    exceptions = types.SimpleNamespace(RayError=RayError, ActorUnavailableError=UnavailableError)

    def __init__(self):
        self.removed = []
        self.util = types.SimpleNamespace(remove_placement_group=self.removed.append)

    def wait(self, references, timeout):
        return [r for r in references if r.value is not None], []

    def get(self, reference):
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def kill(self, handle):
        handle.killed = True

    def cluster_resources(self):
        return {"CPU": 3.0}

    def available_resources(self):
        return {"CPU": 1.0}


class Scene:
    """A fleet of two actor hosts whose clock stands where it is put."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        self.now = 100.0
        monkeypatch.setattr(fleet.time, "monotonic", lambda: self.now)
        self.handles = []
        monkeypatch.setattr(fleet, "make_head", lambda *arguments, **options: (self.make(), "the head's group"))
        monkeypatch.setattr(fleet, "make_actor_host", self.make)
        engine = RayEngine(actor_hosts=2, cpus_per_host=4, head_cpus=2)
        launch = begin(plan(Config(), engine), engine)
        for name in ("keys", "actor-0", "actor-1"):
            new_folder(launch.folder / "secrets" / name)
        self.said, self.learners = [], []
        self.ray = Ray()
        self.fleet = fleet.Fleet(
            self.ray, launch.config, engine, launch.folder,
            argv=["train"], begun=False, tell=self.said.append, point=self.learners.append,
        )  # fmt: skip
        self.config = launch.config

    def make(self, *arguments):
        self.handles.append(Handle())
        return self.handles[-1]

    def answer(self, unit, method, value):
        self.handles[unit].calls[method].value = value

    def check(self, seconds=2.0):
        self.now += seconds
        return self.fleet.check()

    def order(self, unit):
        order, _ = self.handles[unit].calls["run"].arguments
        return json.loads(order)

    def place(self, unit, version=VERSION):
        self.check()
        self.answer(unit, "where", (f"10.0.0.{unit}", f"box{unit}", version))
        return self.check()

    def begin_training(self, address="10.0.0.0"):
        self.check()
        transport = f'[transport]\nbind = "{address}"\nkeys = "k"\n'
        self.answer(0, "read", transport)
        return self.check()


@pytest.fixture
def scene(tmp_path, monkeypatch):
    return Scene(tmp_path, monkeypatch)


@pytest.fixture
def training(scene):
    scene.place(0)
    scene.begin_training()
    for unit in (1, 2):
        scene.place(unit)
    return scene


def test_the_head_is_placed_first_and_actors_are_told_where_its_learner_is(scene):
    assert scene.place(0) is None
    order = scene.order(0)
    assert order["run"]["transport"]["bind"] == "10.0.0.0"
    assert order["run"]["run"]["head"]
    assert (order["cores"], order["begun"], order["argv"]) == (2, False, ["train"])
    assert "replay.key_secret" in order["keys"]
    scene.check()
    assert len(scene.handles) == 3
    scene.place(1)
    assert "run" not in scene.handles[1].calls  # Nobody knows yet where the learner is.
    scene.begin_training()
    assert scene.learners == ["10.0.0.0:22003"]
    scene.check()
    words = scene.order(1)["arguments"]
    assert words[:3] == ["apex.actor", "--learner", "10.0.0.0:22003"]
    assert words[-4:] == ["--processes", "4", "--envs", "16"]


@pytest.mark.parametrize(("inserts_wait", "niceness"), [(False, 0), (True, 10)])
def test_actors_leave_cpu_time_to_the_learner_if_their_inserts_wait(scene, inserts_wait, niceness):
    replay = replace(scene.config.replay, samples_per_insert=8.0, inserts_wait=inserts_wait)
    scene.fleet.config = replace(scene.config, replay=replay)
    scene.place(0)
    scene.begin_training()
    scene.place(1)
    assert scene.order(1)["niceness"] == niceness


def test_a_unit_without_a_node_says_what_it_waits_for_and_joins(training):
    scene = training
    scene.answer(2, "run", UnavailableError())
    scene.check()
    assert scene.said[-1] == "actor-1 was lost; Ray restarts it on a node with free CPUs"
    scene.check(10)
    scene.check(10)
    assert scene.said[-1] == "actor-1 waits for a node with 4 CPUs: 1 of 3 CPUs are free"
    before = len(scene.said)
    scene.answer(2, "where", UnavailableError())
    scene.check()
    assert len(scene.said) == before  # It is still away; that was said.
    scene.place(2)
    assert scene.said[-1] == "actor-1 is on box2 (10.0.0.2)"
    assert scene.order(2)["arguments"][0] == "apex.actor"


def test_a_head_that_is_lost_goes_on_where_it_is_and_actors_are_ordered_to_it(training):
    scene = training
    scene.answer(0, "run", UnavailableError())
    scene.check()
    scene.check()
    scene.answer(0, "where", ("10.0.0.7", "box7", VERSION))
    scene.check()
    assert scene.order(0)["begun"]
    scene.begin_training("10.0.0.7")
    assert scene.learners[-1] == "10.0.0.7:22003"
    assert "stop" in scene.handles[1].calls
    scene.answer(1, "run", (NEIGHBOUR_GONE, ""))
    scene.check()
    scene.place(1)
    assert scene.order(1)["arguments"][2] == "10.0.0.7:22003"


@pytest.mark.parametrize(
    ("status", "ends"),
    [(FINISHED, FINISHED), (REFUSED, REFUSED), (HOPELESS, FAILED), (NEIGHBOUR_GONE, None), (-9, None)],
)
def test_what_the_heads_end_means_for_the_run(training, status, ends):
    training.answer(0, "run", (status, "why"))
    ending = training.check()
    assert (ending.status if ending else None) == ends
    assert not ends or ending.cause == "head: why"


def test_the_run_goes_on_without_an_actor_host_and_ends_without_any(training):
    training.answer(1, "run", (REFUSED, "no such environment"))
    assert training.check() is None
    assert training.said[-1] == "actor-0: no such environment; the run continues without this actor host"
    assert [handle.killed for handle in training.handles] == [False, True, False]  # Its CPUs are free again.
    training.answer(2, "run", (HOPELESS, "it crashes"))
    ending = training.check()
    assert (ending.status, ending.cause) == (FAILED, "no actor host is left; actor-1: it crashes")


def test_an_actor_host_that_ended_well_is_ordered_again(training):
    training.answer(1, "run", (FINISHED, ""))
    assert training.check() is None
    training.check(5)
    training.answer(1, "where", ("10.0.0.1", "box1", VERSION))
    first = training.handles[1].calls["run"]
    training.check()
    assert training.handles[1].calls["run"] is not first


def test_a_unit_whose_guard_is_killed_again_and_again_is_given_up(training):
    for _ in range(20):
        training.answer(1, "run", (-9, ""))
        training.check()
        if training.said[-1].endswith("the run continues without this actor host"):
            break
        training.place(1)
    assert training.said[-1] == "actor-0: ended with status -9; the run continues without this actor host"


def test_a_call_that_fails_once_costs_no_unit(training):
    training.answer(1, "run", RayError("PermissionError: [Errno 13] Permission denied: '/root'"))
    assert training.check() is None
    assert training.said[-1] == "actor-0: PermissionError: [Errno 13] Permission denied: '/root'; starting it again"
    training.place(1)
    assert training.said[-1] == "actor-0 is on box1 (10.0.0.1)"
    assert not training.handles[1].killed


def test_another_version_is_refused(scene):
    ending = scene.place(0, version="0.0.1")
    assert (ending.status, ending.cause) == (
        REFUSED,
        f"head is on box0 (10.0.0.0), which has apex 0.0.1, not {VERSION}",
    )


def test_what_ray_cannot_start_ends_it_with_rays_words(scene):
    ending = None
    while ending is None:
        scene.check()
        scene.answer(0, "where", RayError("long\nModuleNotFoundError: No module named 'apex'\n"))
        ending = scene.check()
    assert scene.now < 200
    assert (ending.status, ending.cause) == (FAILED, "head: ModuleNotFoundError: No module named 'apex'")


def test_at_the_end_actors_stop_first_and_every_place_is_given_back(training):
    training.answer(0, "run", (FINISHED, ""))
    training.fleet.end()
    assert all("stop" in handle.calls for handle in training.handles)
    assert all(handle.killed for handle in training.handles)
    assert training.ray.removed == [
        "the head's group"
    ]  # Otherwise the next run of this session would wait for its CPUs.
