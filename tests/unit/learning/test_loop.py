"""The learner's loop saves, reports and ends as it is told; its front desk welcomes, leases and says goodbye."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.trainers import NETWORK, SCHEMA, Tape, make_batch, make_trainer
from support.waiting import until

from apex.config import CheckpointConfig, Config, LearnerConfig, ReplayConfig, RunConfig, TransportConfig
from apex.dqn.networks import flatten_parameters, make_network
from apex.errors import ConfigError
from apex.launch.status import ask
from apex.learning.batch_ring import LoaderFigures
from apex.learning.coordinator.coordinator import FORGET_SECONDS, CoordinatorConfig, run_coordinator
from apex.learning.loop import CoordinatorLink, LearnerLoop, Reporter, describe_training
from apex.learning.parameter_publisher import PublishingThread
from apex.learning.run_save import DivergedError
from apex.learning.setup import choose_device
from apex.replay_memory.store.location import store_path
from apex.runs.checkpoints.policy_file import BEST, PlayedGames, read_policy
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.runtime.children import ChildDiedError, start_child, stop_children
from apex.runtime.file_lock import FileLock
from apex.runtime.gpu import read_cuda
from apex.runtime.lifecycle import Stop
from apex.runtime.ports import choose_ports, is_free
from apex.transport.codec import Codec
from apex.transport.control_client import ControlClient, MetricsSender
from apex.transport.endpoints import ParameterSubscriber
from apex.transport.header import WIRE_VERSION
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, greet, read_welcome
from apex.transport.sockets import RefusedError, open_context
from apex.types import Parameters, Progress

pytestmark = pytest.mark.programs

CONFIG = Config(checkpoint=CheckpointConfig(period=2), learner=LearnerConfig(batch_size=16))


class Loop:
    """A learner's loop with the coordinator's end of its pipe in the test's hand."""

    def __init__(self, num_batches, num_shards=1, max_skipped_updates=10, **run):
        self.pipe, pipe = multiprocessing.Pipe()
        self.tape = Tape(*(make_batch(number) for number in range(num_batches)))
        self.trainer = make_trainer(self.tape)
        self.saved = []
        self.saved_at = []  # updates
        self.connected = []
        self.loaders = LoaderFigures(np.zeros(2), np.zeros(2), np.zeros(1, np.int64))
        learner = replace(CONFIG.learner, max_skipped_updates=max_skipped_updates)
        replay = ReplayConfig(num_shards=num_shards)
        self.loop = LearnerLoop(
            self.trainer,
            CoordinatorLink(pipe, replay, lambda *connection: self.connected.append(connection), Progress()),
            Reporter(pipe, SimpleNamespace(batch_size=16, loaders=self.loaders)),
            save=self.save,
            learner=learner,
            checkpoint=CONFIG.checkpoint,
            run=RunConfig(**run),
        )

    def save(self, progress):
        self.saved.append(progress)
        self.saved_at.append(self.trainer.num_updates)

    def tell(self, *replay, end="", steps=0, absent=""):
        news = {"replay": [{"priorities": endpoint} for endpoint in replay], "absent": absent}
        progress = {"steps": steps, "episodes": 2, "elapsed_seconds": 3}
        self.pipe.send_bytes(json.dumps({**news, "end": end, **progress}).encode())

    def run(self, stop=None, check=lambda: None):
        return self.loop.run(stop or Stop(), check)

    def reports(self):
        found = []
        while self.pipe.poll():
            found.append(json.loads(self.pipe.recv_bytes()))
        return found


def test_a_report_says_nothing_of_units_before_the_first_update():
    trainer = Loop(1).trainer
    assert all(parameter.grad is not None for parameter in trainer.online.parameters())  # places, with nothing in them
    assert "dormant_share" not in describe_training(trainer)


def test_ends_after_its_last_update_although_batches_remain():
    loop = Loop(9, max_updates=5)
    assert loop.run() == "reached 5 updates"
    assert loop.trainer.num_updates == 5
    assert len(loop.tape.updates) == 5
    last = loop.reports()[-1]
    assert last["updates"] == 5
    assert last["loaders_draw"] == 0
    assert 0 <= last["load_per_core"] < 1_000
    assert last["policy_lag"] == 4 - 2  # The fifth update is made by version 4, what it learns from by version 2.


def test_saves_every_period_and_knows_the_steps():
    loop = Loop(9, max_updates=5)
    loop.tell("tcp://a", steps=1234)
    loop.run()
    assert loop.saved == [Progress(1234, 2, 3)] * 2
    assert loop.connected == [("tcp://a", 0)]


def test_follows_a_replay_server_that_moved_and_only_then():
    loop = Loop(9, max_updates=3)
    for endpoint in ("tcp://a", "tcp://a", "tcp://b"):
        loop.tell(endpoint)
    loop.run()
    assert loop.connected == [("tcp://a", 0), ("tcp://b", 0)]


def test_priorities_follow_each_shard_and_a_wait_names_who_is_not_there():
    loop = Loop(0, num_shards=2)
    loop.tell("tcp://a", "", absent="shard 1 of 2")
    loop.tell("tcp://a", "tcp://b", absent="shard 1 of 2")
    stop = Stop()
    said = []

    def check():
        said.extend(report["waiting"] for report in loop.reports())
        if len(said) == 1:
            loop.tell("tcp://a", "tcp://b", absent="")
        elif said:
            stop.request()

    loop.run(stop, check)
    assert loop.connected == [("tcp://a", 0), ("tcp://b", 1)]
    assert said[0].startswith("for shard 1 of 2 to say hello (")
    assert said[-1].startswith("for batches: a replay server has fewer transitions than its share of")


def test_ends_for_the_reason_that_it_is_told():
    loop = Loop(1)
    loop.tell(end="reached the score 18")
    assert loop.run() == "reached the score 18"


def test_a_signal_ends_it():
    stop = Stop()
    stop.request()
    assert Loop(1).run(stop) == "interrupted"


def spoil(loop, *numbers):
    for number in numbers:
        loop.tape.batches[number].n_step_return[3] = math.nan


def test_a_loss_that_is_not_finite_is_skipped_and_shown():
    loop = Loop(5, max_updates=5)
    spoil(loop, 1, 2)
    assert loop.run() == "reached 5 updates"
    last = loop.reports()[-1]
    assert (last["updates"], last["skipped_updates"]) == (5, 2)
    assert math.isfinite(last["loss"])
    assert 0 <= last["dormant_share"] < 1


def test_too_many_of_them_in_a_row_end_it_with_the_reason_and_without_a_save():
    loop = Loop(9, max_updates=9, max_skipped_updates=3)
    spoil(loop, 1, 2, 4, 5, 6)  # Two in a row are not three.
    with pytest.raises(DivergedError, match=r"3 updates in a row was not finite, the last one number 7.* --resume"):
        loop.run()
    assert loop.saved_at == [4]  # Due at 2, 4 and 6, of which two were skipped; what comes last is the caller's.


def test_nothing_is_saved_while_updates_are_skipped_but_as_soon_as_one_is_made_again(caplog):
    loop = Loop(9, max_updates=7)
    spoil(loop, 1, 2, 3, 6)
    loop.run()
    loop.loop.save()
    assert loop.saved_at == [5, 6]
    assert "no checkpoint at update 7: the last 1 updates were skipped" in caplog.text


def test_a_coordinator_that_is_gone_ends_it():
    loop = Loop(3)
    loop.pipe.close()
    with pytest.raises(ChildDiedError, match="coordinator"):
        loop.run()


def test_cuda_without_a_gpu_is_an_error_never_a_silent_cpu():
    if read_cuda().usable:  # To ask torch here would be to begin with CUDA before a fork.
        assert choose_device(LearnerConfig(device="cuda")).type == "cuda"
        return
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device(LearnerConfig(device="cuda"))
    assert choose_device(LearnerConfig()).type == "cpu"


@pytest.fixture
def transport():
    """Ports that nobody listens on."""
    config = Config(run=RunConfig(tensorboard=False), transport=TransportConfig(port_offset=3_000))
    return replace(choose_ports(config, is_free, lambda sentence: None).transport, lease_seconds=3.0)


def test_the_publishing_thread_publishes_the_newest_and_the_last(transport):
    codec, values = Codec(1, SCHEMA), np.ones(4, np.float32)
    publishing = PublishingThread(transport.endpoint("parameters"), codec, Stop())
    with open_context() as context:
        subscriber = ParameterSubscriber(context, transport.endpoint("parameters"), codec, num_parameters=4)
        publishing.publish(Parameters(1, values))
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 1
        publishing.publish(Parameters(2, values))
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 2
        assert subscriber.receive(0.3) is None  # Each is published once.
        publishing.publish(Parameters(3, values))
        publishing.close()
        assert until(lambda: subscriber.receive(0.1), "parameters").version == 3
    publishing.check()


def test_a_thread_that_fails_stops_the_role_and_is_raised_there(transport):
    stop = Stop()
    first = PublishingThread(transport.endpoint("parameters"), Codec(1, SCHEMA), Stop())
    until(lambda: not is_free("127.0.0.1", transport.parameters_port + transport.port_offset), "bind")
    second = PublishingThread(transport.endpoint("parameters"), Codec(1, SCHEMA), stop)
    until(lambda: stop.requested, "failure")
    with pytest.raises(ConfigError, match="is in use"):
        second.check()
    first.close()
    second.close()


class FrontDesk:
    """A coordinator process, and its pipe."""

    def __init__(self, folder, config, num_actors):
        self.folder = folder
        self.transport = config.transport
        self.pipe, pipe = multiprocessing.Pipe()
        desk = CoordinatorConfig(config, SCHEMA, folder.run_id, num_actors, 1, folder.path)
        self.child = start_child("coordinator", run_coordinator, desk, pipe, self.pipe)
        pipe.close()
        self.port = self.transport.control_port + self.transport.port_offset

    def report(self, **fields):
        self.pipe.send_bytes(json.dumps(fields).encode())

    def welcome(self, role="actor", **more):
        return read_welcome(greet(Route("127.0.0.1", self.port), role, Stop(), **more))

    def status(self):
        return ask(self.transport.endpoint("control"), 5.0)

    def news(self, wanted):
        def found():
            if self.pipe.poll(0.1):
                news = json.loads(self.pipe.recv_bytes())
                return news if wanted(news) else None
            return None

        return until(found, "news")


def open_desk(tmp_path, transport, num_shards, **limits):
    config = Config(
        transport=transport,
        network=NETWORK,
        replay=ReplayConfig(num_shards=num_shards),
        run=RunConfig(folder=str(tmp_path), name="run", max_steps=1_000, **limits),
    )
    front = FrontDesk(RunFolder.create(config, SCHEMA), config, num_actors=6)
    network = make_network(NETWORK, SCHEMA, seed=0)
    front.parameters = Parameters(7, flatten_parameters(network))
    front.report(num_parameters=len(front.parameters.values), updates=0)
    return front


@pytest.fixture
def desk(tmp_path, transport):
    front = open_desk(tmp_path, transport, 1)
    yield front
    stop_children([front.child])


@pytest.fixture
def two_shards(tmp_path, transport):
    front = open_desk(tmp_path, replace(transport, heartbeat_seconds=0.2), 2)
    yield front
    stop_children([front.child])


def session_of(welcome, role, status=None, endpoints=None, shard=0):
    stop = Stop()
    return Session(welcome, role, stop, lambda: status or {}, endpoints, shard), stop


def test_hello_is_answered_with_all_that_a_role_needs(desk):
    welcome = desk.welcome(num_streams=4)
    assert welcome.run_id == desk.folder.run_id
    assert welcome.config == desk.folder.config
    assert welcome.schema == SCHEMA
    assert welcome.num_parameters == len(desk.parameters.values)
    assert [stream.actor_id for stream in welcome.streams] == [5, 4, 3, 2]
    assert [stream.actor_id for stream in desk.welcome(num_streams=4).streams] == [1, 0]


def test_a_run_folder_and_a_host_whose_names_are_no_text_keep_nobody_out(tmp_path, transport, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host\udcff")
    front = open_desk(tmp_path / "runs\udcff", transport, 1)
    try:
        welcome = front.welcome("evaluator")
        assert welcome.config.run.folder == str(tmp_path / "runs?")
        evaluator, _ = session_of(welcome, "evaluator")
        until(lambda: [row["host"] for row in front.status()["roles"]] == ["host?"], "heartbeat")
        evaluator.close()
    finally:
        stop_children([front.child])


def test_the_status_tells_of_a_program_whose_main_thread_makes_no_turns(desk, monkeypatch):
    monkeypatch.setattr("apex.transport.heartbeat.EXPLAIN_SECONDS", 0.2)
    evaluator, stop = session_of(desk.welcome("evaluator"), "evaluator")
    stuck = until(lambda: [row for row in desk.status()["roles"] if row["waiting"]], "silence")
    assert stuck[0]["waiting"].startswith("for its own main thread (")
    until(lambda: stop.tick() or not any(row["waiting"] for row in desk.status()["roles"]), "turns")
    evaluator.close()


def test_actors_wait_for_replay_and_learn_where_it_is(desk):
    replay, _ = session_of(desk.welcome("replay"), "replay", {"num_inserted": 42}, {"priorities": "tcp://1.2.3.4:5"})
    welcome = desk.welcome(num_streams=1, needs_replay=True)
    assert welcome.replay == [{"priorities": "tcp://1.2.3.4:5"}]
    assert desk.news(lambda news: news["steps"] == 42)["replay"] == welcome.replay
    status = desk.status()
    assert status["steps"] == 42
    assert status["phase"] == "filling replay"
    replay.close()
    until(lambda: not desk.status()["roles"], "goodbye")


def test_actors_wait_until_every_shard_has_said_hello(two_shards):
    endpoints = [{"priorities": f"tcp://1.2.3.{shard}:5"} for shard in range(2)]
    late, _ = session_of(two_shards.welcome("replay", shard=1), "replay", {"num_inserted": 5}, endpoints[1], shard=1)
    news = two_shards.news(lambda news: news["replay"][1])
    assert (news["replay"][0], news["absent"]) == ({}, "shard 0 of 2")
    assert two_shards.welcome().replay == []
    first, _ = session_of(two_shards.welcome("replay"), "replay", {"num_inserted": 7}, endpoints[0])
    assert two_shards.welcome(num_streams=1, needs_replay=True).replay == endpoints
    news = two_shards.news(lambda news: news["steps"] == 12)
    assert (news["replay"], news["absent"]) == (endpoints, "")
    late.close()
    assert two_shards.news(lambda news: news["absent"])["absent"] == "shard 1 of 2"
    first.close()


def test_the_trainer_hears_of_a_server_that_moved_although_nothing_else_has_changed(two_shards):
    with open_context() as context:
        client = ControlClient(context, two_shards.transport.endpoint("control"))
        beat = {"type": "heartbeat", "session": 5, "run_id": two_shards.folder.run_id, "role": "replay", "host": "h"}
        for endpoint in ("tcp://a", "tcp://b"):
            said = {"shard": 1, "streams": [], "endpoints": {"priorities": endpoint}, "status": {}}
            client.send({**beat, "pid": 1, **said})
            news = two_shards.news(lambda news, endpoint=endpoint: news["replay"][1].get("priorities") == endpoint)
            assert news["absent"] == "shard 0 of 2"  # It was not told later, because of something else.


def test_a_shard_that_this_run_does_not_have_is_refused(two_shards):
    for shard in (2, -1):
        with pytest.raises(RefusedError, match=f"--shard {shard}: this run has replay.num_shards 2, 0 ... 1"):
            two_shards.welcome("replay", shard=shard)


def test_a_shard_that_a_living_server_holds_is_refused_and_one_that_fell_silent_is_given(two_shards):
    holder, _ = session_of(two_shards.welcome("replay", shard=1), "replay", {"num_inserted": 5}, shard=1)
    until(lambda: two_shards.status()["roles"], "heartbeat")
    with pytest.raises(
        RefusedError, match=r"shard 1 of 2 is there already: process \d+ on .*; stop it, or name anothe"
    ):
        two_shards.welcome("replay", shard=1)
    two_shards.welcome("replay", shard=0)
    with open_context() as context:  # One that was killed: its heartbeats just end.
        client = ControlClient(context, two_shards.transport.endpoint("control"))
        beat = {"type": "heartbeat", "session": 5, "run_id": two_shards.folder.run_id, "role": "replay", "host": "h"}
        client.send({**beat, "pid": 1, "shard": 0, "streams": [], "endpoints": {}, "status": {}})
        assert client.receive(5.0)["type"] == "state"
    began = time.monotonic()
    two_shards.welcome("replay", shard=0)
    assert time.monotonic() - began < FORGET_SECONDS / 2
    holder.close()
    two_shards.welcome("replay", shard=1)  # It has said goodbye.


@contextmanager
def owned(memory):
    ownership = FileLock(memory)
    try:
        yield
    finally:
        ownership.release()


def test_a_server_that_died_on_this_host_need_not_be_waited_for(tmp_path, transport):
    patient = replace(transport, heartbeat_seconds=300.0, lease_seconds=900.0)
    front = open_desk(tmp_path, patient, 1)
    memory = store_path(front.folder.run_id)
    memory.touch()
    try:
        with open_context() as context:
            client = ControlClient(context, patient.endpoint("control"))
            beat = {"type": "heartbeat", "session": 5, "run_id": front.folder.run_id, "role": "replay"}
            beat |= {"host": socket.gethostname(), "shard": 0, "streams": [], "endpoints": {}, "status": {}}
            client.send({**beat, "pid": 1})
            assert client.receive(30.0)["type"] == "state"
        with owned(memory), ThreadPoolExecutor(1) as pool:
            stop = Stop()
            greeting = pool.submit(greet, Route("127.0.0.1", front.port), "replay", stop)
            with pytest.raises(TimeoutError):  # It lives: its memory has an owner.
                greeting.result(1.0)
            stop.request()
        assert front.welcome("replay").run_id == front.folder.run_id
    finally:
        memory.unlink()
        stop_children([front.child])


def test_a_shard_hears_that_its_inserts_are_wanted_where_another_one_waits_for_its_own(two_shards):
    waits = {"samplers_wait_for": ""}
    other, _ = session_of(two_shards.welcome("replay", shard=1), "replay", waits, shard=1)
    own, _ = session_of(two_shards.welcome("replay"), "replay", {"samplers_wait_for": "learner"})
    waits["samplers_wait_for"] = "inserts"
    until(lambda: own.inserts_wanted, "wish")
    assert not other.inserts_wanted
    waits["samplers_wait_for"] = ""
    until(lambda: not own.inserts_wanted, "end of the wish")
    own.close()
    other.close()


def test_ids_are_free_again_after_goodbye_and_after_silence(desk):
    first = desk.welcome(num_streams=6)
    session, _ = session_of(first, "actor")
    session.close()
    assert len(desk.welcome(num_streams=6).streams) == 6  # This one never sends a heartbeat ...
    until(lambda: desk.status()["actors"], "status")
    third = desk.welcome(num_streams=6)  # ... so this one gets its ids when the lease has run out.
    assert len(third.streams) == 6
    assert min(stream.incarnation for stream in third.streams) > max(stream.incarnation for stream in first.streams)


def test_who_lost_its_ids_is_told_and_ends(desk):
    welcome = desk.welcome(num_streams=6)
    until(lambda: greet(Route("127.0.0.1", desk.port), "actor", Stop(), num_streams=1), "a lease that ran out")
    session, stop = session_of(welcome, "actor")
    until(lambda: stop.requested, "refusal")
    assert session.lost
    assert not session.finished
    session.close()


def test_another_wire_version_and_nonsense_are_refused(desk):
    with open_context() as context:
        client = ControlClient(context, desk.transport.endpoint("control"))
        client.send({"type": "hello", "session": 1, "wire": WIRE_VERSION + 1, "role": "actor"})
        assert client.receive(5.0)["reason"] == f"wire version {WIRE_VERSION + 1}, but this is {WIRE_VERSION}"
        for nonsense in ({"type": "hello"}, {"type": "what", "session": 1}, {"type": "heartbeat", "session": "x"}):
            client.send(nonsense)
        client.send_frames([b"garbage"])
        client.send({"type": "heartbeat", "session": 1, "run_id": 5})
        assert client.receive(5.0) == {"type": "refused", "reason": "this is another run"}


def test_the_best_evaluation_is_kept_and_shown(desk):
    codec = Codec(desk.folder.run_id, SCHEMA)
    session, _ = session_of(desk.welcome("evaluator"), "evaluator")
    result = {"mean": 3.0, "median": 2.0, "length": 10.0, "episodes": 5, "updates": 7, "confirmed": False}
    games = {"seed": 12, "num_envs": 5, "epsilon": 0.5}
    session.post(codec.encode_evaluation({**result, **games}, desk.parameters))
    session.post(codec.encode_evaluation({**result, "mean": 1.0}, None))
    until(lambda: desk.status()["evaluator"]["score"] == 1.0, "evaluation")
    assert desk.status()["evaluator"]["best"] == 3.0
    worse = Parameters(
        9, desk.parameters.values + 1
    )  # From an evaluator that was started again, and thinks it the best.
    session.post(codec.encode_evaluation({**result, "mean": 2.0, "updates": 9}, worse))
    until(lambda: desk.status()["evaluator"]["score"] == 2.0, "evaluation")
    kept = read_policy(desk.folder.checkpoints / BEST)[0]
    assert (kept.num_updates, kept.games) == (7, PlayedGames(seed=12, episodes=5, num_envs=5, epsilon=0.5))
    session.close()


def test_the_first_confirmed_score_ends_the_run_whatever_evaluation_comes_with_it(tmp_path, transport):
    front = open_desk(tmp_path, transport, 1, stop_score=10.0)
    codec = Codec(front.folder.run_id, SCHEMA)
    result = {"median": 2.0, "length": 10.0, "episodes": 5, "updates": 7}
    try:
        with open_context() as context:
            client = ControlClient(context, transport.endpoint("control"))
            for mean, confirmed in ((9.0, False), (12.0, True), (1.0, False)):  # In one burst.
                client.send_frames(codec.encode_evaluation({**result, "mean": mean, "confirmed": confirmed}, None))
            assert front.news(lambda news: news["end"])["end"] == "reached the score 10"
        assert front.status()["evaluator"]["score"] == 12.0
        front.report(finished="reached the score 10", updates=5)
        until(lambda: front.child.exitcode is not None, "coordinator's end")
    finally:
        stop_children([front.child])
    rows = read_curve(front.folder.curves / "evaluator.jsonl")
    assert [row["scalars"]["evaluator/score"] for row in rows] == [9.0, 12.0]


def test_metrics_reach_the_curves_with_the_steps_that_are_known(desk):
    # As all that is replay says where it is, curves begin, whichever came first: this heartbeat or the first row.
    endpoints = {"priorities": "tcp://127.0.0.1:1"}
    replay, _ = session_of(desk.welcome("replay"), "replay", {"num_inserted": 42, "rate": "x"}, endpoints)
    desk.news(lambda news: news["steps"] == 42)
    scalars = {"actor_highest_id/score": 17.0, "actors/score_0006_epsilon_0.10000": 1.0, "actors/steps_per_second": 2.0}
    with open_context() as context:
        metrics = MetricsSender(context, desk.transport.endpoint("metrics"), Codec(desk.folder.run_id, SCHEMA))
        metrics.send({"role": "actor", "steps": None, "time": 1.0, "scalars": scalars})
        metrics.send({"role": "actor", "scalars": "nonsense"})
        until(lambda: desk.status()["actors"]["score"] == 17.0, "score")
    replay.close()
    curve = desk.folder.curves / "actor.jsonl"
    until(lambda: curve.exists() and read_curve(curve), "curve")
    assert read_curve(curve)[0]["steps"] == 42
    assert read_curve(curve)[0]["scalars"] == {"actor_highest_id/score": 17.0}  # Six actors have no other tags.


def test_no_message_ends_the_coordinator_and_all_are_counted(desk):
    """Each of these did, by an error that nobody caught, at once or when its figures were summed up."""
    codec = Codec(desk.folder.run_id, SCHEMA)
    huge = 10**400
    result = {"mean": [1], "median": 1, "length": 1, "episodes": 1, "updates": 1, "confirmed": True}
    heartbeat = {"type": "heartbeat", "session": 5, "run_id": desk.folder.run_id, "role": "replay", "host": "h"}
    heartbeat |= {"pid": 1, "shard": 0, "streams": [], "endpoints": {}}
    with open_context() as context:
        metrics = MetricsSender(context, desk.transport.endpoint("metrics"), codec)
        for scalars in ({"actors/x": huge}, {"learner/loss": 1.0}):
            metrics.send({"role": "actor", "steps": None, "time": 1.0, "scalars": scalars})
        metrics.send({"role": "actor", "steps": None, "time": huge, "scalars": {}})
        client = ControlClient(context, desk.transport.endpoint("control"))
        client.send_frames(codec.encode_evaluation(result, None))
        for status in ({"size": huge}, {"num_inserted": 1e308}, {"busy_share": [1]}):
            client.send({**heartbeat, "status": status})

        def refused():
            counts = desk.status()["refusals"]
            return sum(counts.get("control", {}).values()) == 4 and sum(counts.get("metrics", {}).values()) == 3

        until(refused, "refusals")
    assert desk.status()["refusals"]["metrics"] == {"json": 2, "fields": 1}
    assert desk.status()["refusals"]["control"] == {"json": 1, "fields": 3}


def test_a_histogram_is_written_once_however_often_it_comes_and_one_that_is_none_ends_nothing(desk):
    first, second = ({"counts": [count], "edges": [1.0, 10**0.125]} for count in (1.0, 2.0))
    status = {"num_inserted": 42, "priority_histogram": first}
    replay, _ = session_of(desk.welcome("replay"), "replay", status, {"priorities": "tcp://1.2.3.4:5"})

    def rows(role="replay"):
        curve = desk.folder.curves / f"{role}.jsonl"
        return read_curve(curve) if curve.exists() else []

    until(lambda: len(rows()) >= 3, "rows")
    status |= {"priority_histogram": {"counts": "many"}, "rate": "none"}  # Such heartbeats are refused.
    count = len(rows("learner"))
    until(lambda: len(rows("learner")) >= count + 2, "two more rows of the others")
    assert [role["rate"] for role in desk.status()["roles"]] != ["none"]
    status["priority_histogram"] = second
    until(lambda: len([row for row in rows() if "histograms" in row]) == 2, "the second histogram")
    replay.close()
    assert [row["histograms"] for row in rows() if "histograms" in row] == [
        {"replay/priority": first},
        {"replay/priority": second},
    ]


def test_the_end_is_told_to_the_trainer_and_then_to_everybody(desk):
    status = {"num_inserted": 999}
    replay, stop = session_of(desk.welcome("replay"), "replay", status)
    desk.news(lambda news: news["steps"] == 999)
    status["num_inserted"] = 1_000
    assert desk.news(lambda news: news["end"])["end"] == "reached 1000 steps"
    assert not stop.requested
    desk.report(finished="reached 1000 steps", updates=5)
    until(lambda: stop.requested, "end")
    assert replay.finished
    replay.close()
    until(lambda: desk.child.exitcode is not None, "coordinator's end")
    assert desk.child.exitcode == 0


def test_the_end_is_told_to_who_has_not_asked_again(tmp_path, transport):
    """To wait for the next heartbeat of each would be the longest part of the goodbye."""
    front = open_desk(tmp_path, replace(transport, heartbeat_seconds=60.0, lease_seconds=200.0), 1)
    try:
        replay, stop = session_of(front.welcome("replay"), "replay")
        until(lambda: front.status()["roles"], "heartbeat")
        front.report(finished="reached 1000 steps", updates=5)
        until(lambda: stop.requested, "end", seconds=5.0)
        assert replay.finished
        replay.close()
    finally:
        stop_children([front.child])


def test_who_has_asked_for_the_status_is_sent_the_last_one_with_the_reason(desk):
    """The coordinator may be gone before an observer asks again."""
    with open_context(None) as context:
        observer = ControlClient(context, desk.transport.endpoint("control"), linger=0.0)
        observer.send({"type": "status"})
        assert observer.receive(5.0)["phase"] != "finished"
        desk.report(finished="reached 60 updates", updates=60)
        last = observer.receive(5.0)
        observer.close()
    assert (last["type"], last["phase"], last["reason"]) == ("status", "finished", "reached 60 updates")
    assert last["updates"] == 60


def test_without_its_trainer_the_coordinator_ends(desk):
    desk.status()
    desk.pipe.close()
    until(lambda: desk.child.exitcode is not None, "coordinator's end")
    assert desk.child.exitcode == 0
