"""The tree of settings: what it refuses, what it computes, and that it survives a file."""

from dataclasses import replace

import pytest

from apex.config import (
    ActorConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    ReplayConfig,
    RunConfig,
    TransportConfig,
    dump_toml,
    flatten,
    from_dict,
    from_saved,
    load_toml,
    to_dict,
)
from apex.errors import ConfigError
from apex.replay_memory.settings import batch_endpoints


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Config(actor={"n_step": 3}), ["actor", "ActorConfig", "{'n_step': 3}"]),
        (
            lambda: Config(learner=LearnerConfig(batch_size=101), replay=ReplayConfig(min_size_to_sample=100)),
            ["learner.batch_size 101", "replay.min_size_to_sample 100"],
        ),
        (
            lambda: Config(run=RunConfig(stop_score=1.0), evaluator=EvaluatorConfig(enabled=False)),
            ["run.stop_score", "evaluator"],
        ),
        (
            lambda: Config(
                learner=LearnerConfig(batch_size=10), replay=ReplayConfig(capacity=52, min_size_to_sample=10)
            ),
            ["replay.capacity 52", "actor.segment_length", "53"],
        ),
        (
            lambda: Config(
                learner=LearnerConfig(batch_size=10),
                replay=ReplayConfig(capacity=104, min_size_to_sample=10, num_shards=2),
            ),
            ["replay.capacity 104", "replay.num_shards 2", "53"],
        ),
        (lambda: Config(replay=ReplayConfig(num_shards=3)), ["learner.batch_size 512", "replay.num_shards 3"]),
        (
            lambda: Config(replay=ReplayConfig(num_shards=4), actor=ActorConfig(num_actors=3)),
            ["actor.num_actors 3", "replay.num_shards 4"],
        ),
        (
            lambda: Config(replay=ReplayConfig(num_shards=2), transport=TransportConfig(receipts_port=65_530)),
            ["transport.receipts_port", "65535", "65540"],
        ),
        (
            lambda: Config(replay=ReplayConfig(num_samplers=64), transport=TransportConfig(batches_port=65_000)),
            ["transport.batches_port", "65540"],
        ),
        (lambda: TransportConfig(experience_port=1023), ["transport.experience_port", "1024", "1023"]),
        (lambda: TransportConfig(port_offset=50_000), ["transport.experience_port", "port_offset", "71001"]),
        (lambda: TransportConfig(lease_seconds=2.9), ["transport.lease_seconds 2.9", "heartbeat_seconds 1.0"]),
        (lambda: TransportConfig(bind="0.0.0.0"), ["transport.bind '0.0.0.0'", "--transport.keys"]),
        (lambda: TransportConfig(keys="k", insecure_no_auth=True), ["transport.keys 'k'", "--insecure-no-auth"]),
        (lambda: RunConfig(name="a/b"), ["run.name", "'a/b'"]),
        (lambda: RunConfig(name=".."), ["run.name", "'..'"]),
        (lambda: ReplayConfig(inserts_wait=True), ["replay.inserts_wait", "replay.samples_per_insert"]),
        (lambda: from_dict({"repaly": {}}), ["repaly", "mean replay?"]),
        (lambda: from_dict({"replay": {"capactiy": 1}}), ["replay.capactiy", "mean replay.capacity?"]),
        (lambda: from_dict({"learner": {"capacity": 1}}), ["learner.capacity", "mean replay.capacity?"]),
        (lambda: from_dict({"replay": {"zzz": 1}}), ["replay.zzz"]),
        (lambda: from_dict({"transport": {"metrics_port": 5}}), ["transport.metrics_port"]),
        (lambda: from_dict({"replay": 5}), ["replay", "5"]),
        (lambda: from_dict({"replay": {"capacity": 1e6}}), ["replay.capacity", "2147483648", "1000000.0"]),
        (lambda: from_dict({"replay": {"capacity": True}}), ["replay.capacity", "True"]),
        (lambda: from_dict({"actor": {"gamma": "0.9"}}), ["actor.gamma", "'0.9'"]),
        (lambda: from_dict({"environment": {"clip_rewards": 1}}), ["environment.clip_rewards", "1"]),
    ],
)
def test_a_contradiction_or_a_wrong_type_is_refused(make, names):
    with pytest.raises(ConfigError) as error:
        make()
    assert [name for name in names if name not in str(error.value)] == []


def test_an_address_beyond_loopback_needs_keys_or_the_flag():
    assert TransportConfig(bind="0.0.0.0", insecure_no_auth=True).endpoint("control") == "tcp://0.0.0.0:22003"
    assert TransportConfig(bind="0.0.0.0", keys="keys").endpoint("control") == "tcp://0.0.0.0:22003"


def test_sizes_of_the_whole_memory_are_divided_by_shards():
    replay = ReplayConfig(
        num_shards=3, capacity=1_000, min_size_to_sample=1_000, max_bytes=1_000, samples_per_insert=2.0
    )
    each = ReplayConfig(num_shards=1, capacity=334, min_size_to_sample=334, max_bytes=333, samples_per_insert=2.0)
    assert replay.per_shard() == each
    assert each.per_shard() == each


def test_each_shard_has_its_own_ports():
    transport = TransportConfig(port_offset=100)
    ports = [transport.endpoint(name, index=2) for name in ("experience", "priorities", "receipts")]
    assert ports == [f"tcp://127.0.0.1:{port}" for port in (21_121, 21_122, 21_123)]


def test_each_sampler_of_each_shard_has_its_own_port():
    config = Config(replay=ReplayConfig(num_shards=2, num_samplers=3), transport=TransportConfig(port_offset=100))
    ports = [batch_endpoints(config, shard, "host") for shard in range(2)]
    assert ports[0] == [f"tcp://host:{port}" for port in (21_104, 21_124, 21_144)]
    assert ports[1] == [f"tcp://host:{port}" for port in (21_114, 21_134, 21_154)]
    assert batch_endpoints(config, 0)[0] == "tcp://127.0.0.1:21104"


def test_a_server_name_has_the_shard_if_there_are_several():
    assert ReplayConfig().server_name(0) == "replay"
    assert ReplayConfig(num_shards=2).server_names([0, 1]) == "replay-0, replay-1"


def test_an_endpoint_binds_or_reaches_a_host():
    transport = TransportConfig(port_offset=100)
    assert transport.endpoint("experience") == "tcp://127.0.0.1:21101"
    assert transport.endpoint("control", "learner.local") == "tcp://learner.local:22103"


def test_a_tree_updates_a_base():
    base = Config(seed=7, actor=ActorConfig(n_step=5, gamma=0.9))
    config = from_dict({"actor": {"gamma": 0.5}}, base)
    assert config == replace(base, actor=ActorConfig(n_step=5, gamma=0.5))


def test_an_integer_passes_as_a_float_and_none_as_none():
    assert type(from_dict({"run": {"max_minutes": 5}}).run.max_minutes) is float
    base = Config(run=RunConfig(stop_score=1.0))
    assert type(from_dict({"run": {"stop_score": 475}}, base).run.stop_score) is float
    assert from_dict({"run": {"stop_score": None}}, base).run.stop_score is None


def test_dictionaries_round_trip():
    config = Config(seed=3, run=RunConfig(stop_score=-21.0))
    assert from_dict(to_dict(config)) == config


def test_every_setting_has_a_dotted_name():
    flat = flatten(Config(seed=3))
    assert flat["seed"] == 3
    assert flat["replay.capacity"] == 2_000_000
    assert {name.partition(".")[0] for name in flat} == set(to_dict(Config()))


@pytest.mark.parametrize("stop_score", [None, 475.0])
def test_toml_round_trips(tmp_path, stop_score):
    config = Config(
        seed=3, environment=EnvironmentConfig(id='quoted "id" \\'), run=RunConfig(stop_score=stop_score, name="b")
    )
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(config))
    assert load_toml(path) == config


def test_a_toml_file_updates_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[actor]\nn_step = 7\n")
    assert load_toml(path) == Config(actor=ActorConfig(n_step=7))


@pytest.mark.parametrize("content", [b"[replay\n", b"\xff\xfe", b"[actor]\nn_step = 0\n", b"[x]\n", None])
def test_an_unusable_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_toml(path)


def test_a_retired_setting_is_ignored_in_saved_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 3\n[transport]\nmetrics_port = 22004\nport_offset = 10\n")
    assert load_toml(path) == Config(seed=3, transport=TransportConfig(port_offset=10))
    tree = to_dict(Config(seed=3))
    tree["transport"]["metrics_port"] = 22004
    assert from_saved(tree) == Config(seed=3)


@pytest.mark.parametrize(
    ("num_actors", "window", "expected"),
    [(0, 8, 8), (16, 64, 64), (1_024, 8, 8), (1_025, 8, 7), (4_096, 8, 2), (65_536, 8, 2), (65_536, 1, 1)],
)
def test_the_windows_of_many_actors_shrink(num_actors, window, expected):
    assert ActorConfig(num_actors=num_actors, window=window).send_window == expected


@pytest.mark.parametrize(("algorithm", "steps"), [("", 1), ("mine:Own", 1), ("r2d2", 80 - 35 - 3)])
def test_only_a_sequence_trains_several_steps(algorithm, steps):
    assert replace(Config(), algorithm=algorithm).steps_per_item == steps
