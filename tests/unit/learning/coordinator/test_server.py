"""The coordinator's process answers hellos, leases actor ids, writes curves, and announces the end of the run."""

import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from msgspec.structs import replace as replace_fields
from support.messages import HELLO, RESULT, STATUSES, as_json, make_heartbeat
from support.sealing import reseal, with_json
from support.trainers import NETWORK, SCHEMA
from support.waiting import until

from apex.algorithms.parameters import flatten_parameters
from apex.config import ActorConfig, Config, ReplayConfig, RunConfig
from apex.dqn.networks import make_network
from apex.errors import RefusedError
from apex.facts import EndReason
from apex.launch.status import ask
from apex.learning.coordinator.link import CoordinatorLink, News, TrainerEnd, TrainerReport, TrainerStart
from apex.learning.coordinator.server import run_coordinator
from apex.replay_memory.service import predecessor_is_dead
from apex.runs.checkpoints.policy_file import BEST, PlayedGames, read_policy
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.transport import heartbeat
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import Keys
from apex.transport.heartbeat import Session
from apex.transport.hello import Route, greet
from apex.transport.messages.control import Goodbye, RefusedAnswer, StateAnswer, StatusRequest, decode_answer
from apex.transport.messages.results import ActorScores, Scores
from apex.transport.messages.status import LearnerStatus
from apex.transport.run_codec import RunCodec
from apex.transport.timing import FORGET_SECONDS
from apex.types import Parameters, Progress
from apexreplay.facts import Waiting
from apexreplay.files.file_lock import FileLock
from apexreplay.process.children import start_child, stop_children
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import claim_run, store_path
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.sockets import open_context
from apexreplay.wire.header import WIRE_VERSION
from apexreplay.wire.json_codec import encode_control

pytestmark = pytest.mark.programs


class CoordinatorProcess:
    """A coordinator process, and the trainer's end of its pipe."""

    def __init__(self, folder):
        self.folder = folder
        self.transport = folder.config.transport
        self.pipe, pipe = multiprocessing.Pipe()
        self.link = CoordinatorLink(self.pipe, folder.config.replay, lambda *where: None, Progress())
        self.child = start_child("coordinator", run_coordinator, folder, 1, pipe, self.pipe, False)
        pipe.close()
        self.port = self.transport.control_port + self.transport.port_offset

    def finish(self, end, updates=5):
        self.link.send(TrainerReport(LearnerStatus(updates=updates)))
        self.link.send(TrainerEnd(end))

    def welcome(self, role="actor", **more):
        return greet(Route("127.0.0.1", self.port), role, Stop(), **more)

    def status(self):
        return ask(self.transport.endpoint("control"), 5.0)

    def news(self, wanted):
        def found():
            news = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=News) if self.pipe.poll(0.1) else None
            return news if news is not None and wanted(news) else None

        return until(found, "news")


def start_coordinator(tmp_path, transport, num_shards, **limits):
    config = Config(
        transport=transport,
        network=NETWORK,
        actor=ActorConfig(num_actors=6),
        replay=ReplayConfig(num_shards=num_shards),
        run=RunConfig(folder=str(tmp_path), name="run", max_steps=1_000, **limits),
    )
    coordinator = CoordinatorProcess(RunFolder.create(config, SCHEMA))
    network = make_network(NETWORK, SCHEMA, seed=0)
    coordinator.parameters = Parameters(7, flatten_parameters(network))
    coordinator.link.send(TrainerStart(len(coordinator.parameters.values), 0, Progress()))
    return coordinator


@pytest.fixture
def coordinator(tmp_path, transport):
    coordinator = start_coordinator(tmp_path, transport, 1)
    yield coordinator
    stop_children([coordinator.child])


@pytest.fixture
def two_shards(tmp_path, transport):
    coordinator = start_coordinator(tmp_path, transport, 2)
    yield coordinator
    stop_children([coordinator.child])


def session_of(welcome, role, status=None, endpoints=None, shard=0, **options):
    """A session; `status` are figures of its status, which may change later."""
    stop = Stop()
    return Session(
        welcome, role, stop, lambda: replace_fields(STATUSES[role], **(status or {})), endpoints, shard, **options
    ), stop


def test_a_welcome_has_what_a_role_needs(coordinator):
    welcome = coordinator.welcome(num_streams=4)
    assert welcome.run_id == coordinator.folder.run_id
    assert welcome.config == coordinator.folder.config
    assert welcome.schema == SCHEMA
    assert welcome.num_parameters == len(coordinator.parameters.values)
    assert [stream.actor_id for stream in welcome.streams] == [5, 4, 3, 2]
    assert [stream.actor_id for stream in coordinator.welcome(num_streams=4).streams] == [1, 0]


def test_names_that_are_not_unicode_do_not_prevent_a_welcome(tmp_path, transport, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host\udcff")
    coordinator = start_coordinator(tmp_path / "runs\udcff", transport, 1)
    try:
        welcome = coordinator.welcome("evaluator")
        assert welcome.config.run.folder == str(tmp_path / "runs?")
        evaluator, _ = session_of(welcome, "evaluator")
        until(lambda: [row.host for row in coordinator.status().roles] == ["host?"], "heartbeat")
        evaluator.close()
    finally:
        stop_children([coordinator.child])


def test_the_status_shows_a_stuck_main_thread(coordinator, monkeypatch):
    monkeypatch.setattr(heartbeat, "EXPLAIN_SECONDS", 0.2)
    evaluator, stop = session_of(coordinator.welcome("evaluator"), "evaluator")
    stuck = until(lambda: [row for row in coordinator.status().roles if row.waiting], "silence")
    assert stuck[0].waiting.what == "own_main_thread"
    until(lambda: stop.tick() or not any(row.waiting for row in coordinator.status().roles), "turns")
    evaluator.close()


def test_actors_wait_for_replay_and_receive_its_endpoints(coordinator):
    replay, _ = session_of(
        coordinator.welcome("replay"),
        "replay",
        {"num_inserted": 42, "num_steps": 42},
        {"priorities": "tcp://1.2.3.4:5"},
    )
    welcome = coordinator.welcome(num_streams=1, needs_replay=True)
    assert welcome.replay == [{"priorities": "tcp://1.2.3.4:5"}]
    assert coordinator.news(lambda news: news.progress.num_steps == 42).replay == welcome.replay
    status = coordinator.status()
    assert status.steps == 42
    assert status.phase == "filling_replay"
    replay.close()
    until(lambda: not coordinator.status().roles, "goodbye")


def test_the_trainer_is_informed_of_a_moved_server(two_shards):
    with open_context() as context:
        client = ControlSocket(context, two_shards.transport.endpoint("control"), decode_answer)
        for endpoint in ("tcp://a:1", "tcp://b:1"):
            there = {"priorities": endpoint}
            client.send(make_heartbeat("replay", run_id=two_shards.folder.run_id, shard=1, endpoints=there))
            news = two_shards.news(lambda news, endpoint=endpoint: news.replay[1].get("priorities") == endpoint)
            assert news.waiting == Waiting("replay", "replay-0")  # Nothing else has changed.


def test_a_shard_that_this_run_does_not_have_is_refused(two_shards):
    for shard in (2, -1):
        with pytest.raises(RefusedError, match=rf"--shard {shard}\b.*\b2\b"):
            two_shards.welcome("replay", shard=shard)


def test_a_shard_is_refused_until_its_server_is_silent(two_shards):
    holder, _ = session_of(two_shards.welcome("replay", shard=1), "replay", {"num_inserted": 5}, shard=1)
    until(lambda: two_shards.status().roles, "heartbeat")
    with pytest.raises(RefusedError, match=r"replay-1 .*process \d+ .*--shard"):
        two_shards.welcome("replay", shard=1)
    with open_context() as context:  # A killed server: its heartbeats end without Goodbye.
        client = ControlSocket(context, two_shards.transport.endpoint("control"), decode_answer)
        client.send(make_heartbeat("replay", run_id=two_shards.folder.run_id))
        assert isinstance(client.receive(30.0), StateAnswer)
    began = time.monotonic()
    two_shards.welcome("replay", shard=0)
    assert time.monotonic() - began < FORGET_SECONDS / 2
    holder.close()
    two_shards.welcome("replay", shard=1)  # The holder has sent a goodbye.


@contextmanager
def owned(memory):
    ownership = FileLock(memory)
    try:
        yield
    finally:
        ownership.release()


def test_a_server_replaces_a_dead_one_of_this_host_at_once(tmp_path, transport):
    slow = replace(transport, heartbeat_seconds=300.0, lease_seconds=900.0)
    coordinator = start_coordinator(tmp_path, slow, 1)
    memory = store_path(coordinator.folder.run_id)
    memory.touch()
    claim = ExitStack()  # Otherwise the start of another run removes the file.
    claim.enter_context(claim_run(coordinator.folder.run_id, coordinator.folder.path))
    is_dead = partial(predecessor_is_dead, 0)
    try:
        with open_context() as context:
            client = ControlSocket(context, slow.endpoint("control"), decode_answer)
            client.send(make_heartbeat("replay", run_id=coordinator.folder.run_id, host=socket.gethostname()))
            assert isinstance(client.receive(30.0), StateAnswer)
        with owned(memory), ThreadPoolExecutor(1) as pool:
            stop = Stop()
            greeting = pool.submit(greet, Route("127.0.0.1", coordinator.port), "replay", stop, holder_is_dead=is_dead)
            with pytest.raises(TimeoutError):  # The holder is alive, because its memory has an owner.
                greeting.result(1.0)
            stop.request()
        assert coordinator.welcome("replay", holder_is_dead=is_dead).run_id == coordinator.folder.run_id
    finally:
        memory.unlink()
        claim.close()
        stop_children([coordinator.child])


def test_a_shard_is_informed_that_another_waits_for_inserts(two_shards):
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


def test_ids_are_free_again_after_goodbye_and_after_silence(coordinator):
    first = coordinator.welcome(num_streams=6)
    session, _ = session_of(first, "actor")
    session.close()
    assert len(coordinator.welcome(num_streams=6).streams) == 6  # This host never sends a heartbeat ...
    until(lambda: coordinator.status().actors, "status")
    third = coordinator.welcome(num_streams=6)  # ... so this host gets its ids when the lease has expired.
    assert len(third.streams) == 6
    assert min(stream.incarnation for stream in third.streams) > max(stream.incarnation for stream in first.streams)


def test_a_host_that_lost_its_ids_ends(coordinator):
    welcome = coordinator.welcome(num_streams=6)
    until(lambda: greet(Route("127.0.0.1", coordinator.port), "actor", Stop(), num_streams=1), "a lease that ran out")
    session, stop = session_of(welcome, "actor")
    until(lambda: stop.poll(), "refusal")
    assert session.lost
    assert not session.finished
    session.close()


def test_requests_of_another_version_or_run_are_refused(coordinator):
    with open_context() as context:
        client = ControlSocket(context, coordinator.transport.endpoint("control"), decode_answer)
        client.send_frames(reseal(encode_control(HELLO), version=WIRE_VERSION + 1))
        assert isinstance(client.receive(30.0), RefusedAnswer)
        for invalid in ({"type": "hello"}, {"type": "what", "session": 1}, {"type": "actor_heartbeat", "session": "x"}):
            client.send_frames(with_json(encode_control(HELLO), invalid))
        client.send_frames([b"garbage"])
        client.send(make_heartbeat("actor", run_id=5))
        assert isinstance(client.receive(30.0), RefusedAnswer)


def test_the_best_evaluation_is_kept_and_shown(coordinator):
    codec = RunCodec(coordinator.folder.run_id, SCHEMA)
    session, _ = session_of(coordinator.welcome("evaluator"), "evaluator")
    result = replace_fields(RESULT, mean=3.0, updates=7, seed=12, episodes=5, num_envs=5, epsilon=0.5)
    session.post(codec.encode_evaluation(result, coordinator.parameters))
    session.post(codec.encode_evaluation(replace_fields(result, mean=1.0), None))
    until(lambda: coordinator.status().evaluator.score == 1.0, "evaluation")
    assert coordinator.status().evaluator.best == 3.0
    # A restarted evaluator sends its first result as its best.
    worse = Parameters(9, coordinator.parameters.values + 1)
    session.post(codec.encode_evaluation(replace_fields(result, mean=2.0, updates=9), worse))
    until(lambda: coordinator.status().evaluator.score == 2.0, "evaluation")
    kept = read_policy(coordinator.folder.checkpoints / BEST)[0]
    assert (kept.num_updates, kept.games) == (7, PlayedGames(seed=12, episodes=5, num_envs=5, epsilon=0.5))
    session.close()


def test_scores_reach_the_curves_with_the_known_number_of_steps(coordinator):
    # Curves begin when all replay servers have reported.
    endpoints = {"priorities": "tcp://127.0.0.1:1"}
    replay, _ = session_of(coordinator.welcome("replay"), "replay", {"num_inserted": 42, "num_steps": 42}, endpoints)
    coordinator.news(lambda news: news.progress.num_steps == 42)
    waiting = [Scores([ActorScores(5, 2, 34.0, 8)])]
    actor, _ = session_of(coordinator.welcome("actor"), "actor", take_scores=lambda: waiting.pop() if waiting else None)
    until(lambda: coordinator.status().actors.score == 17.0, "score")
    waiting.append(Scores([ActorScores(5, 1, 3.0, 8)]))
    actor.close()  # Sends the last scores.
    until(lambda: coordinator.status().actors.score == 3.0, "score")
    replay.close()
    curve = read_curve(coordinator.folder.curves / "actor.jsonl")
    assert [(row["steps"], row["scalars"]["actors/episodes"]) for row in curve] == [(42, 2), (42, 3)]


def test_a_key_serves_only_its_own_role(tmp_path, transport):
    new_folder(tmp_path / "keys")
    coordinator = start_coordinator(tmp_path, replace(transport, keys=str(tmp_path / "keys")), 1)
    endpoint, run_id = transport.endpoint("control"), coordinator.folder.run_id
    replay = make_heartbeat("replay", run_id=run_id)
    try:
        with ExitStack() as opened:
            clients = {
                role: ControlSocket(
                    opened.enter_context(open_context(Keys(tmp_path / "keys", role))), endpoint, decode_answer
                )
                for role in ("replay", "actor", "evaluator", "observer")
            }
            scores = make_heartbeat("actor", session=6, run_id=run_id, scores=Scores([ActorScores(5, 1, 9.0, 8)]))
            forged = RunCodec(run_id, SCHEMA).encode_evaluation(replace_fields(RESULT, confirmed=True), None)

            def status():
                clients["observer"].send(StatusRequest())
                return clients["observer"].receive(30.0)

            clients["replay"].send(replay)
            assert isinstance(clients["replay"].receive(30.0), StateAnswer)
            for claim in (replace_fields(HELLO, role="evaluator", num_streams=0), replay, Goodbye(replay.session)):
                clients["actor"].send(claim, run_id)
            clients["actor"].send_frames(forged)
            clients["evaluator"].send(scores, run_id)
            until(lambda: status().refusals.get("control") == {"role": 5}, "refusals")
            assert [row.role for row in status().roles] == ["replay"]
            assert (status().evaluator.score, status().actors.score, status().end) == (None, None, None)
            clients["evaluator"].send_frames(forged)
            until(lambda: status().evaluator.score == RESULT.mean, "an evaluator's own evaluation")
            clients["replay"].send(Goodbye(replay.session), run_id)
            until(lambda: not status().roles, "goodbye")
    finally:
        stop_children([coordinator.child])


def test_invalid_messages_are_counted_and_do_not_end_the_coordinator(coordinator):
    codec = RunCodec(coordinator.folder.run_id, SCHEMA)
    huge, run_id = 10**400, coordinator.folder.run_id
    replay, actor = (as_json(make_heartbeat(role, run_id=run_id)) for role in ("replay", "actor"))
    with open_context() as context:
        client = ControlSocket(context, coordinator.transport.endpoint("control"), decode_answer)
        client.send_frames(with_json(codec.encode_evaluation(RESULT, None), {**as_json(RESULT), "mean": [1]}))
        for field in ({"size": huge}, {"num_inserted": 1e308}, {"busy_share": [1]}):
            client.send_frames(with_json(encode_control(HELLO), {**replay, "status": {**replay["status"], **field}}))
        for scores in ({"actors": [[0, 1, huge, 1]]}, {"actors": [[0, 0, 1.0, 1]]}, {"faults": huge}):
            client.send_frames(with_json(encode_control(HELLO), {**actor, "scores": scores}))
        client.send(make_heartbeat("replay", run_id=run_id, shard=1))  # The run has one shard.
        client.send_frames(with_json(encode_control(HELLO), b"{"))
        until(lambda: sum(coordinator.status().refusals.get("control", {}).values()) == 9, "refusals")
    assert coordinator.status().refusals["control"] == {"fields": 8, "json": 1}


def test_the_trainer_and_then_all_programs_learn_of_the_end(coordinator):
    status = {"num_inserted": 999, "num_steps": 999}
    replay, stop = session_of(coordinator.welcome("replay"), "replay", status)
    coordinator.news(lambda news: news.progress.num_steps == 999)
    status["num_inserted"] = status["num_steps"] = 1_000
    assert coordinator.news(lambda news: news.end).end == EndReason("steps", 1_000.0)
    assert not stop.poll()
    coordinator.finish(EndReason("steps", 1_000.0))
    until(lambda: stop.poll(), "end")
    assert replay.finished
    replay.close()
    until(lambda: coordinator.child.exitcode is not None, "coordinator's end")
    assert coordinator.child.exitcode == 0


def test_the_end_is_sent_without_a_request(tmp_path, transport):
    """Waiting for the next heartbeat of each program would delay the end."""
    coordinator = start_coordinator(tmp_path, replace(transport, heartbeat_seconds=60.0, lease_seconds=200.0), 1)
    try:
        replay, stop = session_of(coordinator.welcome("replay"), "replay")
        until(lambda: coordinator.status().roles, "heartbeat")
        coordinator.finish(EndReason("steps", 1_000.0))
        until(lambda: stop.poll(), "end", seconds=5.0)
        assert replay.finished
        replay.close()
    finally:
        stop_children([coordinator.child])


def test_observers_receive_the_last_status_with_the_end(coordinator):
    """The coordinator may be gone before an observer asks again."""
    with open_context(None) as context:
        observer = ControlSocket(context, coordinator.transport.endpoint("control"), decode_answer, linger=0.0)
        observer.send(StatusRequest())
        assert observer.receive(30.0).phase != "finished"
        coordinator.finish(EndReason("updates", 60.0), updates=60)
        last = observer.receive(30.0)
    assert (last.phase, last.end, last.updates) == ("finished", EndReason("updates", 60.0), 60)


def test_the_coordinator_ends_without_its_trainer(coordinator):
    coordinator.status()
    coordinator.pipe.close()
    until(lambda: coordinator.child.exitcode is not None, "coordinator's end")
    assert coordinator.child.exitcode == 0
