"""The tree of settings: what it refuses, in which words, and that it survives a file."""

from dataclasses import replace

import pytest

from apex.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    NetworkConfig,
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

BRANCHES = {
    "environment": EnvironmentConfig,
    "actor": ActorConfig,
    "replay": ReplayConfig,
    "learner": LearnerConfig,
    "network": NetworkConfig,
    "evaluator": EvaluatorConfig,
    "checkpoint": CheckpointConfig,
    "transport": TransportConfig,
    "run": RunConfig,
}


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("environment.id", "", "environment.id must name an environment, got ''"),
        ("environment.frame_skip", 0, "environment.frame_skip must be >= 1, got 0"),
        ("environment.frame_stack", 0, "environment.frame_stack must be >= 1, got 0"),
        ("environment.frame_stack", 17, "environment.frame_stack must be <= 16, got 17"),
        ("environment.max_episode_frames", 0, "environment.max_episode_frames must be >= 1, got 0"),
        ("environment.image_size", 7, "environment.image_size must be 8 ... 512, got 7"),
        ("environment.image_size", 513, "environment.image_size must be 8 ... 512, got 513"),
        ("environment.noop_max", -1, "environment.noop_max must be >= 0, got -1"),
        ("environment.sticky_actions", 1.0, "environment.sticky_actions must be in [0, 1), got 1.0"),
        ("environment.sticky_actions", -0.1, "environment.sticky_actions must be in [0, 1), got -0.1"),
        ("actor.num_actors", -1, "actor.num_actors must be >= 1 (or 0: by the machine), got -1"),
        ("actor.num_actors", 65_537, "actor.num_actors must be <= 65536, got 65537"),
        ("actor.num_processes", -1, "actor.num_processes must be >= 0, got -1"),
        ("actor.envs_per_process", -1, "actor.envs_per_process must be >= 0, got -1"),
        ("actor.num_threads", 0, "actor.num_threads must be >= 1, got 0"),
        ("actor.epsilon_base", 0.0, "actor.epsilon_base must be in (0, 1), got 0.0"),
        ("actor.epsilon_base", 1.0, "actor.epsilon_base must be in (0, 1), got 1.0"),
        ("actor.epsilon_exponent", -1.0, "actor.epsilon_exponent must be >= 0, got -1.0"),
        ("actor.n_step", 0, "actor.n_step must be 1 ... 64, got 0"),
        ("actor.n_step", 65, "actor.n_step must be 1 ... 64, got 65"),
        ("actor.gamma", 0.0, "actor.gamma must be in (0, 1], got 0.0"),
        ("actor.gamma", 1.1, "actor.gamma must be in (0, 1], got 1.1"),
        ("actor.segment_length", 0, "actor.segment_length must be 1 ... 1000, got 0"),
        ("actor.segment_length", 1001, "actor.segment_length must be 1 ... 1000, got 1001"),
        ("actor.window", 0, "actor.window must be 1 ... 64, got 0"),
        ("actor.window", 65, "actor.window must be 1 ... 64, got 65"),
        ("actor.parameters_period", 0, "actor.parameters_period must be >= 1, got 0"),
        ("replay.min_size_to_sample", 0, "need 0 < min_size_to_sample <= capacity, got 0 and 2000000"),
        ("replay.capacity", 1, "need 0 < min_size_to_sample <= capacity, got 50000 and 1"),
        ("replay.capacity", 2**31 + 1, "replay.capacity must be <= 2147483648, got 2147483649"),
        ("replay.max_bytes", -1, "replay.max_bytes must be >= 0, got -1"),
        ("replay.priority_exponent", 2.1, "replay.priority_exponent must be 0 ... 2, got 2.1"),
        ("replay.priority_exponent", -0.1, "replay.priority_exponent must be 0 ... 2, got -0.1"),
        ("replay.min_priority", 0.0, "replay.min_priority must be in (0, 1), got 0.0"),
        ("replay.num_samplers", 0, "replay.num_samplers must be 1 ... 64, got 0"),
        ("replay.num_samplers", 65, "replay.num_samplers must be 1 ... 64, got 65"),
        ("replay.batches_in_flight", 0, "replay.batches_in_flight must be 1 ... 1024, got 0"),
        ("replay.batches_in_flight", 1025, "replay.batches_in_flight must be 1 ... 1024, got 1025"),
        ("replay.samples_per_insert", -1.0, "replay.samples_per_insert must be >= 0, got -1.0"),
        ("replay.samples_per_insert_tolerance", 0.0, "replay.samples_per_insert_tolerance must be > 0, got 0.0"),
        ("replay.num_shards", 0, "replay.num_shards must be 1 ... 64, got 0"),
        ("replay.num_shards", 65, "replay.num_shards must be 1 ... 64, got 65"),
        ("replay.inserts_wait", True, "replay.inserts_wait needs replay.samples_per_insert > 0"),
        ("learner.batch_size", -1, "learner.batch_size must be 1 ... 65536 (or 0: by the machine), got -1"),
        ("learner.batch_size", 65_537, "learner.batch_size must be 1 ... 65536 (or 0: by the machine), got 65537"),
        ("learner.learning_rate", 0.0, "learner.learning_rate must be > 0, got 0.0"),
        ("learner.learning_rate_updates", -1, "learner.learning_rate_updates must be >= 0, got -1"),
        ("learner.final_learning_rate_share", 0.0, "learner.final_learning_rate_share must be in (0, 1], got 0.0"),
        ("learner.final_learning_rate_share", 1.1, "learner.final_learning_rate_share must be in (0, 1], got 1.1"),
        ("learner.optimizer_epsilon", 0.0, "learner.optimizer_epsilon must be > 0, got 0.0"),
        ("learner.max_gradient_norm", 0.0, "learner.max_gradient_norm must be > 0, got 0.0"),
        ("learner.rmsprop_decay", 1.0, "learner.rmsprop_decay must be in [0, 1), got 1.0"),
        ("learner.adam_beta1", -0.1, "learner.adam_beta1 must be in [0, 1), got -0.1"),
        ("learner.adam_beta2", 1.0, "learner.adam_beta2 must be in [0, 1), got 1.0"),
        ("learner.importance_sampling_exponent", 1.1, "learner.importance_sampling_exponent must be 0 ... 1, got 1.1"),
        ("learner.target_period", 0, "learner.target_period must be >= 1, got 0"),
        ("learner.publish_period", 0, "learner.publish_period must be >= 1, got 0"),
        ("learner.num_threads", -1, "learner.num_threads must be >= 0, got -1"),
        ("network.width", 0.0, "network.width must be in (0, 8], got 0.0"),
        ("network.width", 8.1, "network.width must be in (0, 8], got 8.1"),
        ("network.hidden", 0, "network.hidden must be >= 1, got 0"),
        ("network.body_hidden", 0, "network.body_hidden must be >= 1, got 0"),
        ("network.factory", "mine", "network.factory must read package.module:name, got 'mine'"),
        ("evaluator.period_seconds", -1.0, "evaluator.period_seconds must be >= 0, got -1.0"),
        ("evaluator.episodes", 0, "evaluator.episodes must be >= 1, got 0"),
        ("evaluator.episodes", 10_001, "evaluator.episodes must be <= 10000, got 10001"),
        ("evaluator.confirm_episodes", 10_001, "evaluator.confirm_episodes must be <= 10000, got 10001"),
        ("evaluator.num_envs", 0, "evaluator.num_envs must be >= 1, got 0"),
        ("evaluator.num_threads", 0, "evaluator.num_threads must be >= 1, got 0"),
        ("evaluator.confirm_episodes", -1, "evaluator.confirm_episodes must be >= 0, got -1"),
        ("evaluator.epsilon", 1.1, "evaluator.epsilon must be 0 ... 1, got 1.1"),
        ("checkpoint.period", 0, "checkpoint.period must be >= 1, got 0"),
        ("checkpoint.keep", 1, "checkpoint.keep must be >= 2, got 1"),
        ("transport.experience_port", 80, "transport.experience_port + port_offset must be 1024 ... 65535, got 80"),
        ("transport.port_offset", 20_000, "transport.experience_port + port_offset must be 1024 ... 65535, got 71001"),
        ("transport.heartbeat_seconds", 0.0, "transport.heartbeat_seconds must be > 0, got 0.0"),
        ("transport.lease_seconds", 2.9, "transport.lease_seconds must be >= 3 heartbeats, got 2.9"),
        ("transport.bind", "0.0.0.0", "transport.bind '0.0.0.0' is not a loopback address"),
        ("transport.bind", "10.0.0.1", "--transport.keys keys"),
        ("run.max_steps", -1, "run.max_steps must be >= 0, got -1"),
        ("run.max_updates", -1, "run.max_updates must be >= 0, got -1"),
        ("run.max_minutes", -1.0, "run.max_minutes must be >= 0, got -1.0"),
        ("run.tensorboard_port", 80, "run.tensorboard_port must be 1024 ... 65535, got 80"),
        ("run.name", "a/b", "run.name must be a plain folder name, got 'a/b'"),
        ("run.name", "..", "run.name must be a plain folder name, got '..'"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_itself(setting, value, message):
    branch, _, name = setting.partition(".")
    with pytest.raises(ConfigError) as refusal:
        replace(BRANCHES[branch](), **{name: value})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed must be 0 ... 2147483647, got -1"),
        ({"seed": 2**31}, "seed must be 0 ... 2147483647, got 2147483648"),
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
            "transport.receipts_port + port_offset must be <= 65535 for every shard, got 65540 for the last of 2",
        ),
    ],
)
def test_branches_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ConfigError) as refusal:
        Config(**changes)
    assert message in str(refusal.value)


def test_beyond_loopback_is_bound_only_when_that_was_said():
    assert TransportConfig(bind="0.0.0.0", insecure_no_auth=True).endpoint("control") == "tcp://0.0.0.0:52003"
    assert TransportConfig(bind="0.0.0.0", keys="keys").endpoint("control") == "tcp://0.0.0.0:52003"


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
    ports = [transport.endpoint(name, shard=2) for name in ("experience", "priorities", "receipts")]
    assert ports == [f"tcp://127.0.0.1:{port}" for port in (51_121, 51_122, 51_123)]


def test_a_server_is_called_by_its_shard_where_there_are_several():
    assert ReplayConfig().shard_name(0) == "a replay server"
    assert ReplayConfig(num_shards=2).shard_name(1) == "shard 1 of 2"


def test_an_endpoint_is_where_to_bind_or_how_to_reach_a_host():
    transport = TransportConfig(port_offset=100)
    assert transport.endpoint("experience") == "tcp://127.0.0.1:51101"
    assert transport.endpoint("metrics", "learner.local") == "tcp://learner.local:52104"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"repaly": {}}, "unknown setting repaly; known here: seed, environment, actor, replay,"),
        ({"replay": {"capactiy": 1}}, "unknown setting replay.capactiy; known here: num_shards, capacity,"),
        ({"replay": 5}, "replay must be a table of settings, got 5"),
        ({"replay": {"capacity": "lots"}}, "replay.capacity must be int, got 'lots'"),
        ({"replay": {"capacity": 1e6}}, "replay.capacity must be int, got 1000000.0"),
        ({"replay": {"capacity": True}}, "replay.capacity must be int, got True"),
        ({"actor": {"gamma": "0.9"}}, "actor.gamma must be float, got '0.9'"),
        ({"environment": {"clip_rewards": 1}}, "environment.clip_rewards must be bool, got 1"),
        ({"run": {"stop_score": "high"}}, "run.stop_score must be float, got 'high'"),
        ({"learner": {"device": "tpu"}}, "learner.device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"seed": "one"}, "seed must be int, got 'one'"),
    ],
)
def test_names_and_types_that_do_not_exist_are_refused(tree, message):
    with pytest.raises(ConfigError) as refusal:
        from_dict(tree)
    assert message in str(refusal.value)


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
    assert {name.partition(".")[0] for name in flat} == {"seed", *BRANCHES}


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
