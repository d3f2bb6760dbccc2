"""The tree of settings: what it refuses, in which words, and that it survives a file."""

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
    load_toml,
    to_dict,
)
from apex.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": {"n_step": 3}}, "actor must be of the type ActorConfig, got {'n_step': 3}"),
        (
            {"learner": LearnerConfig(batch_size=101), "replay": ReplayConfig(min_size_to_sample=100)},
            "learner.batch_size 101 must be <= replay.min_size_to_sample 100",
        ),
        (
            {"run": RunConfig(stop_score=1.0), "evaluator": EvaluatorConfig(enabled=False)},
            "run.stop_score needs the evaluator",
        ),
        (
            {"learner": LearnerConfig(batch_size=10), "replay": ReplayConfig(capacity=52, min_size_to_sample=10)},
            "replay.capacity 52 must hold a segment of up to 53 transitions",
        ),
        (
            {
                "learner": LearnerConfig(batch_size=10),
                "replay": ReplayConfig(capacity=104, min_size_to_sample=10, num_shards=2),
            },
            "replay.capacity 104 / 2 shards must hold a segment of up to 53 transitions",
        ),
        (
            {"replay": ReplayConfig(num_shards=3)},
            "learner.batch_size 512 must be a multiple of replay.num_shards 3",
        ),
        (
            {"replay": ReplayConfig(num_shards=4), "actor": ActorConfig(num_actors=3)},
            "actor.num_actors 3 must be >= replay.num_shards 4",
        ),
        (
            {"replay": ReplayConfig(num_shards=2), "transport": TransportConfig(receipts_port=65_530)},
            "transport.receipts_port + port_offset must be <= 65535 for every shard and loader, got 65540",
        ),
    ],
)
def test_branches_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ConfigError) as refusal:
        Config(**changes)
    assert message in str(refusal.value)


def test_beyond_loopback_is_bound_only_when_that_was_said():
    assert TransportConfig(bind="0.0.0.0", insecure_no_auth=True).endpoint("control") == "tcp://0.0.0.0:22003"
    assert TransportConfig(bind="0.0.0.0", keys="keys").endpoint("control") == "tcp://0.0.0.0:22003"


def test_what_counts_the_whole_memory_is_divided_among_the_shards_and_the_rest_is_not():
    replay = ReplayConfig(
        num_shards=3, capacity=1_000, min_size_to_sample=1_000, max_bytes=1_000, samples_per_insert=2.0
    )
    each = ReplayConfig(num_shards=1, capacity=334, min_size_to_sample=334, max_bytes=333, samples_per_insert=2.0)
    assert replay.per_shard() == each
    assert each.per_shard() == each


def test_a_part_of_a_batch_is_the_same_from_each_shard():
    assert Config(replay=ReplayConfig(num_shards=4)).part_size == 128
    assert Config().part_size == 512


def test_each_shard_has_ports_of_its_own_ten_apart():
    transport = TransportConfig(port_offset=100)
    ports = [transport.endpoint(name, index=2) for name in ("experience", "priorities", "receipts")]
    assert ports == [f"tcp://127.0.0.1:{port}" for port in (21_121, 21_122, 21_123)]


def test_each_loader_has_a_port_of_its_own_for_batches():
    transport = TransportConfig(port_offset=100)
    assert [transport.port("batches", loader) for loader in range(3)] == [22_102, 22_112, 22_122]
    with pytest.raises(ConfigError, match=r"batches_port .* got 65542"):
        Config(learner=LearnerConfig(num_loaders=64), transport=TransportConfig(port_offset=43_000))


def test_a_server_is_called_by_its_shard_where_there_are_several():
    assert ReplayConfig().server_name(0) == "replay"
    assert ReplayConfig(num_shards=2).server_names([0, 1]) == "replay-0, replay-1"


def test_an_endpoint_is_where_to_bind_or_how_to_reach_a_host():
    transport = TransportConfig(port_offset=100)
    assert transport.endpoint("experience") == "tcp://127.0.0.1:21101"
    assert transport.endpoint("control", "learner.local") == "tcp://learner.local:22103"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"repaly": {}}, "unknown setting repaly; did you mean replay?"),
        ({"replay": {"capactiy": 1}}, "unknown setting replay.capactiy; did you mean replay.capacity?"),
        ({"learner": {"capacity": 1}}, "unknown setting learner.capacity; did you mean replay.capacity?"),
        ({"replay": {"zzz": 1}}, "unknown setting replay.zzz"),
        ({"replay": 5}, "replay must be a table of settings, got 5"),
        ({"replay": {"capacity": 1e6}}, "replay.capacity must be an integer from 1 to 2147483648, got 1000000.0"),
        ({"replay": {"capacity": True}}, "replay.capacity must be an integer from 1 to 2147483648, got True"),
        ({"actor": {"gamma": "0.9"}}, "actor.gamma must be a number above 0 and at most 1, got '0.9'"),
        ({"environment": {"clip_rewards": 1}}, "environment.clip_rewards must be true or false, got 1"),
    ],
)
def test_names_and_types_that_do_not_exist_are_refused(tree, message):
    with pytest.raises(ConfigError) as refusal:
        from_dict(tree)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experience_port": 1023}, "transport.experience_port must be an integer from 1024 to 65535, got 1023"),
        ({"port_offset": 50_000}, "transport.experience_port + port_offset must be from 1024 to 65535, got 71001"),
        ({"lease_seconds": 2.9}, "transport.lease_seconds 2.9 must be >= 3 x heartbeat_seconds 1.0"),
        ({"bind": "0.0.0.0"}, "transport.bind '0.0.0.0' is not a loopback address"),
        ({"bind": "10.0.0.1"}, "--transport.keys keys"),
    ],
)
def test_addresses_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError) as refusal:
        TransportConfig(**changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_a_run_name_is_a_plain_folder_name(name):
    with pytest.raises(ConfigError, match=r"run\.name must be a plain folder name, got "):
        RunConfig(name=name)


def test_inserts_wait_only_at_a_replay_ratio():
    with pytest.raises(ConfigError, match=r"replay\.inserts_wait needs replay\.samples_per_insert > 0"):
        ReplayConfig(inserts_wait=True)


def test_a_tree_lies_over_a_base_and_leaves_the_rest_alone():
    base = Config(seed=7, actor=ActorConfig(n_step=5, gamma=0.9))
    config = from_dict({"actor": {"gamma": 0.5}}, base)
    assert config == replace(base, actor=ActorConfig(n_step=5, gamma=0.5))


def test_a_whole_number_passes_as_a_float():
    assert type(from_dict({"run": {"max_minutes": 5}}).run.max_minutes) is float
    assert type(from_dict({"run": {"stop_score": 475}}).run.stop_score) is float


def test_none_passes_where_a_setting_may_be_none():
    base = Config(run=RunConfig(stop_score=1.0))
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


def test_a_toml_file_lies_over_a_base(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[actor]\nn_step = 7\n")
    assert load_toml(path, Config(seed=9)) == Config(seed=9, actor=ActorConfig(n_step=7))


@pytest.mark.parametrize("content", [b"[replay\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*run\.toml"):
        load_toml(path)


def test_keys_and_the_flag_that_does_without_them_contradict_each_other():
    with pytest.raises(ConfigError, match=r"transport\.keys 'keys' and --insecure-no-auth"):
        TransportConfig(keys="keys", insecure_no_auth=True)
