"""The coordinator's decisions, without a socket or a process."""

import os
import pwd
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields
from support.clocks import Clock
from support.messages import HELLO, RESULT, make_heartbeat
from support.trainers import NETWORK, SCHEMA

from apex.config import ActorConfig, Config, ReplayConfig, RunConfig
from apex.facts import INTERRUPTED, EndReason
from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.fence import FILE, NUMBERS_PER_START
from apex.learning.coordinator.link import TrainerEnd, TrainerReport, TrainerStart
from apex.learning.coordinator.state import MAX_EVALUATIONS
from apex.metric_tags import MAX_METRICS, has_curve
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.transport.messages.control import (
    Goodbye,
    RefusedAnswer,
    StateAnswer,
    StatusRequest,
    WaitAnswer,
    WelcomeAnswer,
    generation_of,
)
from apex.transport.messages.results import ActorScores, MetricSum, Scores
from apex.transport.messages.status import LearnerStatus, Resources
from apex.types import Progress, Tensor
from apexreplay.facts import Waiting
from apexreplay.files.atomic_files import unseal
from apexreplay.wire.header import WireError

END = StateAnswer(stop=True)
TESTS = Path(__file__).parents[3]
TENSORS = [Tensor("output.weight", (2, 4)), Tensor("output.bias", (2,))]
THERE, ELSEWHERE = {"priorities": "tcp://1.2.3.4:5"}, {"priorities": "tcp://2.2.2.2:2"}
REPLAY = replace_fields(HELLO, role="replay", num_streams=0)


class Scene:
    """A coordinator with a clock."""

    def __init__(self, folder, num_shards=1, deterministic=False, num_actors=6, **limits):
        self.clock = Clock()
        config = Config(
            network=NETWORK,
            actor=ActorConfig(num_actors=num_actors),
            replay=ReplayConfig(num_shards=num_shards),
            run=RunConfig(folder=str(folder), name="run", **limits),
        )
        self.folder = RunFolder.create(config, SCHEMA)
        self.options = {"deterministic": True} if deterministic else {}  # False by default.
        self.epoch = 0
        self.restart()

    def restart(self):
        """Starts the learner, again from the second call on."""
        self.epoch += 1
        self.coordinator = Coordinator(self.folder, epoch=self.epoch, clock=self.clock, **self.options)
        self.coordinator.receive(TrainerStart(10, 0, Progress(), TENSORS))

    def hello(self, session, shard=0):
        """Returns the answer to a replay server's hello."""
        return self.coordinator.answer(replace_fields(REPLAY, session=session, shard=shard))

    def join(self, session, shard=0, **more):
        """A replay server joins and sends a heartbeat; returns its fencing number."""
        fence = self.hello(session, shard).fence
        assert isinstance(self.beat(session=session, shard=shard, fence=fence, **more), StateAnswer)
        return fence

    def beat(self, role="replay", session=5, **more):
        heartbeat = make_heartbeat(role, session, run_id=self.folder.run_id, **more)
        return self.coordinator.answer(heartbeat)

    def score(self, *actors, faults=0):
        """Passes on scores, each as actor id, games, score, length; then writes a row of the curves."""
        self.coordinator.keep_scores(Scores([ActorScores(*actor) for actor in actors], faults))
        self.coordinator.write_rows()

    def curve(self, role, *, closes=True):
        if closes:
            self.coordinator.close()
        path = self.folder.curves / f"{role}.jsonl"
        return read_curve(path) if path.exists() else []


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_a_welcome_has_the_replay_servers_and_the_leased_ids(scene):
    answer = scene.coordinator.answer(HELLO)
    assert isinstance(answer, WelcomeAnswer)
    assert (answer.run_id, answer.schema, answer.num_parameters) == (scene.folder.run_id, SCHEMA, 10)
    assert (answer.replay, answer.absent) == ([], "replay")
    assert (answer.run, answer.owner) == ("run", f"{pwd.getpwuid(os.geteuid()).pw_name}@{socket.gethostname()}")
    assert (answer.table, answer.parameters) == (SCHEMA.table.to_dict(), TENSORS)
    assert [stream.actor_id for stream in answer.streams] == [5, 4, 3, 2]
    assert answer.generation == 0
    scene.beat(endpoints=THERE)
    answer = scene.coordinator.answer(HELLO)
    assert (answer.replay, answer.generation) == ([THERE], generation_of([THERE]))


def test_only_actors_are_informed_that_a_replay_server_has_moved(tmp_path):
    scene = Scene(tmp_path, num_shards=2)
    streams = scene.coordinator.answer(HELLO).streams

    def generation():
        return scene.beat("actor", streams=streams).generation

    assert generation() == 0
    scene.beat(endpoints=THERE)
    assert generation() == 0  # The other shard's server has not joined.
    other = {"priorities": "tcp://1.2.3.4:15"}
    assert scene.beat(session=6, shard=1, endpoints=other).generation == 0
    before = generation()
    assert before == generation_of([THERE, other]) > 0
    scene.coordinator.answer(Goodbye(6))
    scene.join(7, shard=1, endpoints=other)  # The server was started again at the same address.
    assert generation() == before
    scene.coordinator.answer(Goodbye(7))
    scene.join(8, shard=1, endpoints={"priorities": "tcp://1.2.3.5:15"})
    assert generation() not in (0, before)


def test_many_programs_send_heartbeats_less_often_and_keep_their_leases(tmp_path):
    scene = Scene(tmp_path, num_actors=1_000)
    fence = scene.join(0)
    streams = {session: scene.coordinator.answer(replace_fields(HELLO, session=session, num_streams=1)).streams
               for session in range(1, 1_000)}  # fmt: skip
    paces = [scene.beat("actor", session, streams=held).pace for session, held in streams.items()]
    assert paces[:150] == [1.0] * 150
    assert paces[-1] == 999 / 150
    assert scene.beat(session=0, fence=fence).pace == 1.0
    lasts = scene.coordinator._config.transport.lease_seconds
    for session, held in streams.items():
        scene.beat("actor", session, streams=held)
    scene.clock.now += (1_000 / 150 - 0.1) * lasts
    scene.coordinator.tick()
    assert scene.beat("actor", 1, streams=streams[1]).pace > 3
    assert scene.coordinator.status().actors.leased == 999
    scene.clock.now += 0.2 * lasts
    scene.coordinator.tick()
    assert scene.coordinator._leases.num_leased == 1


def test_a_heartbeat_of_another_run_or_with_leased_ids_is_refused(scene):
    assert isinstance(scene.coordinator.answer(make_heartbeat("actor", run_id=1)), RefusedAnswer)
    streams = scene.coordinator.answer(HELLO).streams
    assert scene.beat("actor", streams=streams) == StateAnswer(stop=False)
    assert scene.coordinator.status().actors.leased == 4
    assert isinstance(scene.beat("actor", session=6, streams=streams), RefusedAnswer)
    assert scene.coordinator.answer(Goodbye(5)) is None
    assert scene.coordinator.status().roles == []


def test_a_heartbeat_of_an_unknown_shard_is_refused(scene):
    with pytest.raises(WireError, match=r"shard 1\b"):
        scene.beat(shard=1)


def test_a_new_server_waits_until_the_old_one_is_known_to_live(scene):
    scene.beat(session=1)
    ask = replace_fields(REPLAY, session=2)
    assert scene.coordinator.answer(ask) == WaitAnswer(holder=1, host="h", run_id=scene.folder.run_id)
    scene.clock.now += 1.5
    scene.beat(session=1)
    refused = scene.coordinator.answer(ask)
    assert "process 7 on h" in refused.reason


def test_a_new_server_replaces_one_that_misses_two_heartbeats(scene):
    scene.beat(session=1)
    scene.clock.now += 1.9
    assert isinstance(scene.coordinator.answer(replace_fields(REPLAY, session=2)), WaitAnswer)
    scene.clock.now += 0.2
    assert isinstance(scene.coordinator.answer(replace_fields(REPLAY, session=2)), WelcomeAnswer)


def test_earlier_messages_of_a_dead_server_do_not_refuse_a_new_one(scene):
    scene.beat(session=1)
    ask = replace_fields(REPLAY, session=2)
    assert isinstance(scene.coordinator.answer(ask), WaitAnswer)
    scene.clock.now += 0.1
    scene.beat(session=1)  # This heartbeat was sent before the server died.
    assert isinstance(scene.coordinator.answer(ask), WaitAnswer)
    scene.clock.now += 2.1
    assert isinstance(scene.coordinator.answer(ask), WelcomeAnswer)


def test_heartbeats_after_a_goodbye_are_refused(scene):
    scene.beat(session=1)
    scene.coordinator.answer(Goodbye(1))  # The successor on the same host sends Goodbye for the dead server.
    assert isinstance(scene.beat(session=1), RefusedAnswer)
    assert isinstance(scene.coordinator.answer(replace_fields(REPLAY, session=2)), WelcomeAnswer)


def replace_server(scene):
    """Server 1 is cut off and server 2 takes over; returns their fencing numbers."""
    old = scene.join(1, endpoints=THERE)
    scene.clock.now += 2.1
    new = scene.join(2, endpoints=ELSEWHERE)
    assert new > old
    return old, new


def test_a_replaced_server_is_refused_when_its_network_returns(scene):
    old, new = replace_server(scene)
    assert isinstance(scene.beat(session=1, fence=old), RefusedAnswer)
    assert scene.coordinator.decide().replay == [ELSEWHERE]
    assert isinstance(scene.beat(session=2, fence=new), StateAnswer)
    scene.coordinator.answer(Goodbye(2))
    assert isinstance(scene.beat(session=1, fence=old), RefusedAnswer)  # It lacks what server 2 has stored.


@pytest.mark.parametrize(("over", "size"), [(False, None), (True, 90)])
def test_figures_of_a_killed_server_do_not_return(scene, over, size):
    """After the end of a run, those of the last server stay, for the last status."""
    scene.beat(session=1, size=40)
    scene.clock.now += 2.1
    scene.join(2, size=90)
    if over:
        scene.coordinator.receive(TrainerEnd(EndReason("steps", 90.0)))
    scene.coordinator.answer(Goodbye(2))
    assert scene.coordinator.status().replay.size == size
    assert not scene.coordinator.state.members.present


CLOCKS = """
import itertools, sys, time
jumps, real = itertools.cycle((0.0, 86_400.0, -3_600.0)), time.time
time.time = lambda: real() + next(jumps)
from msgspec.structs import replace
from support.messages import HELLO
from support.trainers import NETWORK, SCHEMA
from apex.config import ActorConfig, Config, RunConfig
from apex.learning.coordinator.coordinator import Coordinator
from apex.learning.coordinator.state import RunState
from apex.runs.folder import RunFolder
run = RunConfig(folder=sys.argv[1], name="run", max_minutes=600.0)
config = Config(network=NETWORK, actor=ActorConfig(num_actors=6), run=run)
coordinator = Coordinator(RunFolder.create(config, SCHEMA), epoch=1)
state = RunState(config, name="run", folder="", exploration=coordinator.state.exploration)
for session in range(1, 9):
    coordinator.tick()
    print(len(coordinator.answer(replace(HELLO, session=session, num_streams=3)).streams), end=" ")
    assert coordinator.state.decide_end() is state.decide_end() is None
    assert coordinator.state.elapsed_seconds < 600.0 and state.elapsed_seconds < 600.0
"""


def test_jumps_of_the_wall_clock_end_neither_leases_nor_runs(tmp_path):
    """Each jump is longer than a lease and than the limit of the run."""
    script = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{CLOCKS}", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == (["3", "3", *"000000"], 0), done.stderr


def test_a_replaced_server_stays_refused_after_a_learner_restart(scene):
    old, new = replace_server(scene)
    scene.restart()
    assert isinstance(scene.beat(session=1, fence=old, endpoints=THERE), RefusedAnswer)
    assert isinstance(scene.beat(session=2, fence=new, endpoints=ELSEWHERE), StateAnswer)
    scene.coordinator.answer(Goodbye(2))
    scene.restart()
    assert isinstance(scene.beat(session=1, fence=old), RefusedAnswer)
    assert scene.join(3) > new


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"{")])
def test_the_higher_number_wins_if_the_fence_is_lost(scene, damage):
    old, new = replace_server(scene)
    damage(scene.folder.path / FILE)
    scene.restart()
    assert isinstance(scene.beat(session=1, fence=old), StateAnswer)  # The other one has not been heard yet.
    assert isinstance(scene.beat(session=2, fence=new), StateAnswer)
    assert isinstance(scene.beat(session=1, fence=old), RefusedAnswer)


def test_a_number_that_no_learner_has_given_is_refused(scene):
    fence = scene.join(1)
    for number in (fence - 1, fence, fence + NUMBERS_PER_START, 2**63 - 1):
        assert isinstance(scene.beat(session=2, fence=number), RefusedAnswer)
    assert isinstance(scene.beat(session=1, fence=fence), StateAnswer)
    assert scene.join(1) == fence  # Its first welcome was lost.


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_new_server_waits_for_the_holder_of_an_earlier_start(scene, is_alive):
    fence = scene.join(1)
    scene.clock.now += 100
    scene.restart()
    assert scene.hello(2) == WaitAnswer(holder=1, host="h", run_id=scene.folder.run_id)
    if is_alive:
        scene.clock.now += 1.9
        scene.beat(session=1, fence=fence)
        assert isinstance(scene.hello(2), RefusedAnswer)
    else:
        scene.clock.now += 2.1
        assert scene.hello(2).fence > fence
        assert isinstance(scene.beat(session=1, fence=fence), RefusedAnswer)


def test_the_file_names_the_holder_and_its_store(scene):
    fence = scene.join(1, store_incarnation="99")
    holder = unseal((scene.folder.path / FILE).read_bytes())["holders"]["0"]
    assert holder == {"number": fence, "session": 1, "host": "h", "store_incarnation": "99"}


def test_a_full_disk_is_logged_and_the_fence_still_holds(scene, caplog):
    (scene.folder.path / FILE).mkdir()
    old, _ = replace_server(scene)
    assert FILE in caplog.text
    assert isinstance(scene.beat(session=1, fence=old), RefusedAnswer)


def test_the_status_shows_the_trainer_and_all_learn_of_its_end(scene):
    scene.coordinator.receive(TrainerReport(LearnerStatus(updates=7, loss=0.5)))
    assert scene.coordinator.answer(StatusRequest()).learner.loss == 0.5
    scene.coordinator.receive(TrainerEnd(EndReason("updates", 7.0)))
    assert scene.beat("evaluator") == END
    assert scene.coordinator.answer(HELLO) == END
    assert scene.coordinator.answer(StatusRequest()).end == EndReason("updates", 7.0)


def test_all_programs_learn_that_a_stopped_run_may_be_resumed(scene):
    scene.coordinator.receive(TrainerEnd(INTERRUPTED))
    answers = [scene.coordinator.answer(HELLO), *(scene.beat(role) for role in ("actor", "evaluator"))]
    assert answers == [StateAnswer(stop=True, interrupted=True)] * 3


def test_news_have_the_replay_endpoints_and_the_end(tmp_path):
    scene = Scene(tmp_path, max_steps=10)
    news = scene.coordinator.decide()
    assert (news.replay, news.waiting) == ([{}], Waiting("replay", "replay"))
    assert (news.end, news.progress.num_steps) == (None, 0)
    scene.beat(endpoints=THERE, num_inserted=10)
    news = scene.coordinator.decide()
    assert (news.replay, news.end, news.progress.num_steps) == ([THERE], EndReason("steps", 10.0), 10)


def end_training(scene, *, evaluator=True):
    """All programs have joined when training ends at update 12, by time."""
    for role in ("replay", "actor", *["evaluator"] * evaluator):
        scene.beat(role, session=len(role))
    scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=7), None)
    scene.coordinator.receive(TrainerEnd(EndReason("minutes", 1.0), final=12))


def test_the_run_finishes_when_the_final_parameters_are_evaluated(scene):
    end_training(scene)
    assert scene.beat("actor", session=5) == scene.beat("replay", session=6) == END
    assert scene.beat("evaluator", session=9) == StateAnswer(stop=False, final=12)
    assert scene.coordinator.status().phase == "evaluating_final_policy"
    scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=12, mean=8.0), None)
    assert scene.beat("evaluator", session=9).stop
    status = scene.coordinator.status()
    assert (status.phase, status.evaluator.updates, status.evaluator.score) == ("finished", 12, 8.0)


def test_only_a_restarted_evaluator_may_join_after_training(scene):
    end_training(scene)
    evaluator = replace_fields(HELLO, role="evaluator", session=10, num_streams=0)
    assert isinstance(scene.coordinator.answer(evaluator), WelcomeAnswer)
    assert scene.coordinator.answer(replace_fields(HELLO, session=11)) == END
    scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=12, mean=8.0), None)
    assert scene.coordinator.answer(evaluator) == END


def test_the_wait_for_the_final_evaluation_has_a_limit(scene):
    end_training(scene)
    scene.clock.now += 119.0
    assert not scene.coordinator.state.finished
    scene.clock.now += 1.0
    assert scene.coordinator.state.finished


@pytest.mark.parametrize("joins", [True, False])
def test_a_short_run_waits_for_an_evaluator_that_joins_late(scene, joins):
    scene.clock.now += 1.0
    end_training(scene, evaluator=False)
    scene.clock.now += 118.0
    assert not scene.coordinator.state.finished
    if joins:
        assert scene.beat("evaluator", session=9) == StateAnswer(stop=False, final=12)
    scene.clock.now += 1.0
    assert scene.coordinator.state.finished != joins


def test_a_longer_run_without_an_evaluator_finishes_at_once(scene):
    scene.clock.now += 120.0
    end_training(scene, evaluator=False)
    assert scene.coordinator.state.finished


def test_the_confirmed_score_that_ends_a_run_stays(tmp_path):
    scene = Scene(tmp_path, stop_score=3.0)
    scene.beat("evaluator")
    scene.coordinator.keep_evaluation(replace_fields(RESULT, mean=4.0, confirmed=True), None)
    scene.coordinator.receive(TrainerEnd(EndReason("score", 3.0), final=50))
    assert scene.coordinator.state.finished


def test_steps_of_earlier_starts_count(scene):
    scene.coordinator.receive(TrainerStart(10, 50, Progress(100, 3, 60.0)))
    progress = scene.coordinator.decide().progress
    assert (progress.num_steps, progress.num_episodes, progress.elapsed_seconds) == (100, 3, 60)
    assert scene.coordinator.state.updates_before == 50


def test_evaluations_after_a_confirmed_score_are_ignored(tmp_path):
    scene = Scene(tmp_path, stop_score=3.0)
    for mean, confirmed in ((9.0, False), (4.0, True), (1.0, False)):
        scene.coordinator.keep_evaluation(replace_fields(RESULT, mean=mean, confirmed=confirmed), None)
    status = scene.coordinator.status()
    assert (status.end, status.evaluator.score) == (EndReason("score", 3.0), 4.0)
    assert [row["scalars"]["evaluator/score"] for row in scene.curve("evaluator")] == [9.0, 4.0]
    assert [(row.number, row.score) for row in status.evaluations] == [(1, 9.0), (2, 4.0)]


@pytest.mark.parametrize(("init_from", "best"), [("", None), ("runs/other", 4.0)])
def test_update_0_counts_only_if_the_run_starts_from_a_policy(scene, init_from, best):
    config = scene.coordinator._config
    scene.coordinator._config = replace(config, learner=replace(config.learner, init_from=init_from))
    scene.coordinator._best_policy.keep = lambda score, *played, confirmed: score
    scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=0, mean=4.0), None)
    assert scene.coordinator.state.best_score == best


def test_the_status_has_the_newest_evaluations_with_their_numbers(scene):
    for updates in range(1, MAX_EVALUATIONS + 3):
        scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=updates), None)
    rows = scene.coordinator.status().evaluations
    assert [row.number for row in rows] == [row.updates for row in rows] == list(range(3, MAX_EVALUATIONS + 3))
    assert (rows[-1].score, rows[-1].best, rows[-1].episodes) == (RESULT.mean, RESULT.mean, RESULT.episodes)


def test_rows_have_mean_scores_and_the_total_number_of_games(scene):
    scene.score((1, 2, 6.0, 20), (0, 1, 9.0, 5), (9, 7, 1.0, 1))  # There is no actor 9.
    scene.score((5, 2, 3.0, 7), faults=3)
    scene.score((1, 1, None, 1))
    amounts = scene.coordinator.state.exploration.amounts
    tags = [f"actors/score_{i:04d}_epsilon_{amounts[i]:.5f}" for i in range(6)]
    assert [row["scalars"] for row in scene.curve("actor")] == [
        {tags[1]: 3.0, tags[0]: 9.0, "actors/mean_score": 5.0, "actors/episodes": 3},
        {
            tags[5]: 1.5,
            "actor_highest_id/score": 1.5,
            "actor_highest_id/length": 3.5,
            "actors/mean_score": 1.5,
            "actors/episodes": 5,
            "actors/environment_faults": 3,
        },
        {tags[1]: None, "actors/mean_score": None, "actors/episodes": 6, "actors/environment_faults": 3},
    ]


def test_only_64_actors_have_a_curve_of_their_own(tmp_path):
    for num_actors in (1, 64, 65, 1_000, 65_536):
        chosen = [actor_id for actor_id in range(num_actors) if has_curve(actor_id, num_actors)]
        assert len(chosen) == min(64, num_actors)
        assert (chosen[0], chosen[-1]) == (0, num_actors - 1)
        gaps = {higher - lower for lower, higher in pairwise(chosen)}
        assert max(gaps, default=1) - min(gaps, default=1) <= 1
    scene = Scene(tmp_path, num_actors=200)
    scene.score(*((actor_id, 1, 2.0, 3) for actor_id in range(200)))
    (row,) = scene.curve("actor")
    assert sum(tag.startswith("actors/score_") for tag in row["scalars"]) == 64
    assert (row["scalars"]["actor_highest_id/score"], row["scalars"]["actors/mean_score"]) == (2.0, 2.0)


def test_the_welcome_proposes_replay_servers_for_the_actor_hosts(scene):
    def proposed():
        return scene.coordinator.answer(replace_fields(HELLO, session=1_000)).shards

    assert proposed() == 1
    used = Resources(cores=8.0, memory_bytes=0)
    for session in range(25):
        scene.coordinator.answer(make_heartbeat("actor", session, run_id=scene.folder.run_id, resources=used))
    assert proposed() == 3  # 200 cores, at 80 for each


def test_metrics_become_means_and_a_run_has_a_limited_number_of_them(scene):
    scene.beat(endpoints=THERE, num_inserted=5)
    for start in (0, 10):
        metrics = {f"field_{i}": MetricSum(2, i) for i in range(start, start + 10)}
        scene.coordinator.keep_scores(Scores([], metrics=metrics))
        scene.coordinator.write_rows()
    scene.coordinator.keep_evaluation(replace_fields(RESULT, metrics={"field_3": 0.5, "other": 1.0}), None)
    first, second = (row["scalars"] for row in scene.curve("actor"))
    assert {tag: value for tag, value in first.items() if "metrics" in tag} == {
        f"actor_metrics/field_{i}": i / 2 for i in range(10)
    }
    assert [tag for tag in second if "metrics" in tag] == [f"actor_metrics/field_{i}" for i in range(10, MAX_METRICS)]
    (evaluated,) = scene.curve("evaluator")
    assert {tag: value for tag, value in evaluated["scalars"].items() if "metrics" in tag} == {
        "evaluator_metrics/field_3": 0.5
    }


def test_a_row_has_the_scores_of_all_hosts_since_the_last_row(scene):
    for session in (5, 6):
        streams = scene.coordinator.answer(replace_fields(HELLO, session=session, num_streams=3)).streams
        scores = Scores([ActorScores(streams[0].actor_id, 1, 4.0, 2)])
        assert isinstance(scene.beat("actor", session, streams=streams, scores=scores), StateAnswer)
    scene.coordinator.write_rows()
    assert [row["scalars"]["actors/episodes"] for row in scene.curve("actor")] == [2]


def test_scores_of_a_refused_host_count_but_not_those_of_another_run(scene):
    scores = Scores([ActorScores(0, 1, 4.0, 2)])
    streams = scene.coordinator.answer(HELLO).streams
    assert isinstance(scene.beat("actor", session=6, streams=streams, scores=scores), RefusedAnswer)
    assert isinstance(scene.coordinator.answer(make_heartbeat("actor", run_id=1, scores=scores)), RefusedAnswer)
    assert scene.coordinator.state.num_episodes == 1


def test_scores_wait_until_all_replay_servers_of_a_resumed_run_report(scene):
    scene.coordinator.receive(TrainerStart(10, 50, Progress(num_steps=100)))
    scene.score((0, 1, 2.0, 1))
    assert scene.curve("actor", closes=False) == []
    scene.beat(endpoints=THERE, num_inserted=120)
    scene.score((0, 1, 4.0, 1))
    (row,) = scene.curve("actor")
    assert (row["steps"], row["scalars"]["actors/mean_score"]) == (120, 3.0)


def test_evaluations_wait_until_all_replay_servers_report(scene):
    scene.coordinator.receive(TrainerStart(10, 50, Progress(num_steps=100)))
    for mean in (4.0, 3.0):
        scene.coordinator.keep_evaluation(replace_fields(RESULT, updates=50, mean=mean), None)
    assert scene.curve("evaluator", closes=False) == []
    scene.beat(endpoints=THERE, num_inserted=120)
    scene.coordinator.write_rows()
    scene.coordinator.write_rows()
    rows = scene.curve("evaluator")
    assert [(row["steps"], row["scalars"]["evaluator/score"]) for row in rows] == [(120, 4.0), (120, 3.0)]


def test_closing_writes_the_last_scores(scene):
    scene.coordinator.keep_scores(Scores([ActorScores(0, 1, 2.0, 1)]))
    assert len(scene.curve("actor")) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_runs_have_no_clock_figures_in_their_curves(tmp_path, deterministic):
    scene = Scene(tmp_path, deterministic=deterministic)
    scene.beat(endpoints=THERE, num_inserted=5)
    scene.coordinator.write_rows()
    (row,) = scene.curve("replay")
    assert ("replay/busy_share" in row["scalars"]) is not deterministic
    assert row["scalars"]["replay/num_inserted"] == 5


def test_a_silent_host_is_forgotten_and_its_ids_are_free(scene):
    scene.beat("actor", streams=scene.coordinator.answer(HELLO).streams)
    scene.clock.now += 31.0
    scene.coordinator.tick()
    assert [stream.actor_id for stream in scene.coordinator.answer(replace_fields(HELLO, session=9)).streams] == [
        5,
        4,
        3,
        2,
    ]
