"""The driver's fleet: units that wait, start, get lost and end. Fakes in this file replace Ray."""

import json
import types

import pytest
from msgspec import structs

from apex.config import Config
from apex.facts import Ending, Failure, LogEntry, UnitEvent
from apex.launch.engine import RayEngine
from apex.launch.preflight.requirements import ACTOR_PROCESS_BYTES, CUDA_BYTES, ENVIRONMENT_BYTES
from apex.launch.ray import fleet
from apex.launch.ray.driver import create_on_ray, plan
from apex.launch.ray.order import Report
from apex.version import VERSION
from apexreplay.errors import FAILED, FINISHED, NEIGHBOUR_GONE, REFUSED


class RayError(Exception):
    pass


class UnavailableError(RayError):
    pass


class Reference:
    """What a call returns: a value or an exception once it is `set`."""

    value = None


class ControlService:
    """Ray's control service, until it is `lost`."""

    lost = is_silent = False

    def __init__(self, address):
        self.address = address

    def is_lost(self):
        return self.lost


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

    def get_runtime_context(self):
        return types.SimpleNamespace(gcs_address="10.0.0.0:6379")

    def cluster_resources(self):
        return {"CPU": 3.0}

    def available_resources(self):
        return {"CPU": 1.0}


def report_entry(message):
    return Report("log", entry=LogEntry(time=0.0, role="actor", level="WARNING", message=message)).encode()


class Scene:
    """A fleet of two actor hosts, and its clock."""

    def __init__(self, folder, monkeypatch, gpu=False):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(fleet, "ControlService", ControlService)
        monkeypatch.setattr(ControlService, "lost", False)
        self.now = 100.0
        monkeypatch.setattr(fleet.time, "monotonic", lambda: self.now)
        self.handles, self.places = [], []
        monkeypatch.setattr(fleet, "make_head", lambda *place: (self.make(*place), "the head's group"))
        monkeypatch.setattr(fleet, "make_actor_host", self.make)
        engine = RayEngine(actor_hosts=2, cpus_per_host=4, head_cpus=2)
        start = create_on_ray(plan(Config(), engine), engine, ["train"])
        keys = {name: {f"{name}.key_secret": "digits"} for name in ("keys", "actor-0", "actor-1")}
        self.events, self.shown = [], []
        self.ray = Ray()
        self.fleet = fleet.Fleet(
            self.ray, start.config, engine, start.folder, keys, gpu,
            argv=["train"], begun=False, continues=False, notify=self.events.append, show=self.shown.append,
        )  # fmt: skip
        self.config = start.config

    def make(self, ray, name, needs):
        self.places.append((name, needs))
        self.handles.append(Handle())
        return self.handles[-1]

    def answer(self, unit, method, value):
        self.handles[unit].calls[method].value = value

    def end(self, unit, status, ending=None, messages=()):
        """Ends the guard of a unit, which has reported these messages and this ending."""
        report = "" if ending is None else Report(ending=ending).encode()
        self.answer(unit, "run", (status, report, list(map(report_entry, messages))))

    def check(self, seconds=2.0):
        self.now += seconds
        return self.fleet.check()

    def order(self, unit):
        order, _ = self.handles[unit].calls["run"].arguments
        return json.loads(order)

    def place(self, unit, version=VERSION):
        self.check(11)
        self.answer(unit, "where", (f"10.0.0.{unit}", f"box{unit}", version))
        return self.check()

    def begin_training(self, address="10.0.0.0"):
        self.check()
        transport = f'[transport]\nbind = "{address}"\nkeys = "k"\n'
        self.answer(0, "read_reports", [Report(config_toml=transport).encode()])
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


def failed(status, kind="exit", role="actor"):
    return Ending(status, role, Failure(role=role, kind=kind, value=status, detail="last line"))


def test_the_head_is_placed_first_and_actors_get_its_learners_address(scene):
    assert scene.place(0) is None
    order = scene.order(0)
    assert order["run"]["transport"]["bind"] == "10.0.0.0"
    assert order["run"]["run"]["head"]
    assert (order["cores"], order["begun"], order["argv"]) == (2, False, ["train"])
    assert not order["continues"]
    assert order["keys"] == {"keys.key_secret": "digits"}
    scene.check()
    assert len(scene.handles) == 3
    scene.place(1)
    assert "run" not in scene.handles[1].calls  # The learner's address is unknown.
    scene.begin_training()
    assert scene.events[-1] == UnitEvent(
        unit="head", kind="learner", address="10.0.0.0:22003", tensorboard="127.0.0.1:6006"
    )
    scene.check()
    arguments = scene.order(1)["arguments"]
    assert arguments[:3] == ["apex.actor", "--learner", "10.0.0.0:22003"]
    assert arguments[-4:] == ["--processes", "4", "--envs", "16"]


def test_a_lost_unit_is_reported_while_it_waits_and_joins_again(training):
    training.answer(2, "run", UnavailableError())
    training.check()
    assert training.events[-1] == UnitEvent(unit="actor-1", kind="lost")
    training.check(10)
    training.check(10)
    memory = training.places[2][1].memory
    waiting = UnitEvent(unit="actor-1", kind="waiting", cpus=4, memory=memory, free_cpus=1.0, total_cpus=3.0)
    assert training.events[-1] == waiting
    before = len(training.events)
    training.answer(2, "where", UnavailableError())
    training.check()
    assert len(training.events) == before  # It is still lost, which was reported.
    training.place(2)
    assert training.events[-1] == UnitEvent(unit="actor-1", kind="placed", host="box2", address="10.0.0.2")
    assert training.order(2)["arguments"][0] == "apex.actor"


def test_a_lost_head_resumes_and_actors_get_its_new_address(training):
    training.answer(0, "run", UnavailableError())
    training.check()
    training.check()
    training.answer(0, "where", ("10.0.0.7", "box7", VERSION))
    training.check()
    assert training.order(0)["begun"]
    assert training.order(0)["continues"], "another host finds the run in its mirror"
    training.begin_training("10.0.0.7")
    assert (training.events[-1].kind, training.events[-1].address) == ("learner", "10.0.0.7:22003")
    assert "stop" in training.handles[1].calls
    training.end(1, NEIGHBOUR_GONE, Ending(FINISHED))
    training.check()
    training.place(1)
    assert training.order(1)["arguments"][2] == "10.0.0.7:22003"


@pytest.mark.parametrize(
    "ending", [Ending(FINISHED, "learner"), failed(REFUSED, "refused", "learner"), failed(7, "exit", "replay")]
)
def test_an_ending_that_the_head_reports_ends_the_run(training, ending):
    training.end(0, ending.status, ending)
    found = training.check()
    assert (found.status, found.role) == (ending.status, "head")
    assert found.failure == (ending.failure and structs.replace(ending.failure, unit="head"))


@pytest.mark.parametrize(("status", "ending"), [(NEIGHBOUR_GONE, Ending(FINISHED)), (-9, None)])
def test_a_head_whose_guard_was_stopped_or_killed_restarts(training, status, ending):
    training.end(0, status, ending)
    assert training.check() is None
    training.place(0)
    assert training.order(0)["begun"]


def test_the_run_continues_without_an_actor_host_and_ends_without_any(training):
    training.end(1, REFUSED, failed(REFUSED, "refused"))
    assert training.check() is None
    event = training.events[-1]
    assert (event.unit, event.kind, event.failure.kind) == ("actor-0", "abandoned", "refused")
    assert [handle.killed for handle in training.handles] == [False, True, False]  # Its CPUs are free again.
    training.end(2, REFUSED, failed(REFUSED, "refused"))
    ending = training.check()
    assert (ending.status, ending.failure.unit) == (FAILED, "actor-1")


def test_an_actor_host_that_ended_with_status_0_gets_its_order_again(training):
    training.end(1, FINISHED, Ending(FINISHED, "actor"))
    assert training.check() is None
    first = training.handles[1].calls["run"]
    training.place(1)
    assert training.handles[1].calls["run"] is not first


@pytest.mark.parametrize(("status", "ending", "role", "value"), [(-9, None, "guard", 9), (7, failed(7), "actor", 7)])
def test_an_actor_host_that_fails_too_often_is_given_up(training, status, ending, role, value):
    for _ in range(20):
        training.end(1, status, ending)
        training.check()
        if training.events[-1].kind == "abandoned":
            break
        training.place(1)
    kinds = [event.kind for event in training.events if event.unit == "actor-0" and event.failure]
    assert kinds in (["restarting"] * 3 + ["abandoned"], ["restarting"] * 4 + ["abandoned"])  # Crashes are forgotten.
    failure = training.events[-1].failure
    assert (failure.role, failure.value, failure.unit) == (role, value, "actor-0")


def test_a_call_of_ray_that_fails_once_costs_no_unit(training):
    training.answer(1, "run", RayError("Traceback\nPermissionError: [Errno 13] Permission denied: '/root'\n"))
    assert training.check() is None
    assert training.events[-1].kind == "restarting"
    assert training.events[-1].failure.detail == "PermissionError: [Errno 13] Permission denied: '/root'"
    training.place(1)
    assert training.events[-1].kind == "placed"
    assert not training.handles[1].killed


def test_another_version_is_refused(scene):
    ending = scene.place(0, version="0.0.1")
    assert (ending.status, ending.role, ending.failure.kind) == (REFUSED, "head", "refused")
    assert all(word in ending.failure.detail for word in ("0.0.1", VERSION))


def test_a_unit_that_ray_cannot_start_ends_the_run_with_the_cause(scene):
    ending = None
    while ending is None:
        scene.check(11)
        scene.answer(0, "where", RayError("long\nModuleNotFoundError: No module named 'apex'\n"))
        ending = scene.check()
    assert scene.now < 200
    assert (ending.status, ending.failure.kind) == (FAILED, "error")
    assert ending.failure.detail == "ModuleNotFoundError: No module named 'apex'"


def test_entries_of_units_are_shown_while_they_run_and_at_their_end(training):
    training.answer(1, "read_reports", [report_entry("one")])
    training.check()
    training.end(1, FINISHED, Ending(FINISHED, "actor"), ["two"])
    training.check()
    training.end(0, FINISHED, Ending(FINISHED, "learner"), ["three"])
    training.fleet.end()
    assert [(name, entry.message) for name, entry in training.shown] == [("log", n) for n in ("one", "two", "three")]


def test_at_the_end_actors_stop_first_and_every_place_is_given_back(training):
    training.answer(0, "run", (FINISHED, "", []))
    training.fleet.end()
    assert all("stop" in handle.calls for handle in training.handles)
    assert all(handle.killed for handle in training.handles)
    assert training.ray.removed == ["the head's group"]  # Otherwise the next run would wait for its CPUs.


@pytest.mark.parametrize("gpu", [False, True])
def test_units_have_the_names_of_run_and_role_and_ask_for_memory(tmp_path, monkeypatch, gpu):
    scene = Scene(tmp_path, monkeypatch, gpu)
    scene.place(0)
    scene.check()
    run = scene.config.run.name
    assert [name for name, _ in scene.places] == [f"{run}/head", f"{run}/actor-0", f"{run}/actor-1"]
    head, actors = scene.places[0][1], scene.places[1][1]
    assert (head.num_cpus, head.num_gpus) == (2, int(gpu))
    assert (head.memory > CUDA_BYTES) is gpu
    envs = scene.config.actor.envs_per_process
    assert actors == (4, 4 * (ACTOR_PROCESS_BYTES + envs * ENVIRONMENT_BYTES), 0)


def test_a_service_that_answers_again_does_not_hurry_the_end(training, monkeypatch):
    answers = iter([True, True, False])
    monkeypatch.setattr(ControlService, "is_silent", property(lambda service: next(answers)))
    training.answer(0, "run", (FINISHED, "", []))
    training.fleet.end()
    assert all(handle.killed for handle in training.handles)
    assert training.ray.removed == ["the head's group"]


def test_a_lost_control_service_ends_the_run_without_a_call_that_blocks(training, monkeypatch):
    monkeypatch.setattr(ControlService, "lost", True)
    ending = training.check()
    assert (ending.status, ending.failure.kind) == (NEIGHBOUR_GONE, "silent")
    assert ending.failure.detail == "10.0.0.0:6379"
    training.fleet.end()
    assert all("stop" in handle.calls for handle in training.handles)
    assert not any(handle.killed for handle in training.handles)
    assert training.ray.removed == []
