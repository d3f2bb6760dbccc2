"""The values that replace 0, "chosen for this machine", on simulated machines, and the reasons."""

from dataclasses import replace

import pytest

from apex.config import ActorConfig, Config, LearnerConfig, NetworkConfig, ReplayConfig, RunConfig, TransportConfig
from apex.config.presets import PRESETS
from apex.errors import ConfigError
from apex.runtime.hardware import Machine
from apex.schema import Schema
from apex.sizing import IdleCores, bytes_per_transition, size_to_machine, table_bytes
from apexreplay.store.layout import Sizes

GIB = 2**30


def machine(cores=2, *, gib=24.0, gpu=False, **formats):
    return Machine(cores=cores, memory_bytes=int(gib * GIB), gpu=gpu, **formats)


def images(size=84, *, codec="lz4"):
    return Schema(frame_shape=(size, size), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec=codec)


def vectors(dimensions=4):
    return Schema(frame_shape=(dimensions,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")


def config(*, device="auto", num_threads=0, batch_size=512, replay=None, **actor):
    learner = LearnerConfig(device=device, num_threads=num_threads, batch_size=batch_size)
    return Config(actor=ActorConfig(**actor), learner=learner, replay=ReplayConfig(**(replay or {})))


def size(tree=None, box=None, schema=None):
    return size_to_machine(tree or Config(), box or machine(), schema or images())


def sized(tree=None, box=None, schema=None):
    return size(tree, box, schema).config


def layout(result):
    actor = result.actor
    return actor.num_processes, actor.envs_per_process, actor.num_actors, result.learner.num_threads


# presets without configured sizes


@pytest.mark.parametrize(
    ("preset", "cores", "gpu", "expected"),
    [  # processes, environments of each, actors; the learner's threads, loaders, batch
        ("pong", 1, False, (1, 16, 16, 1, 1, 64)),
        ("pong", 2, False, (1, 16, 16, 2, 1, 64)),  # The actors wait most of the time.
        ("pong", 4, False, (1, 16, 16, 3, 1, 64)),
        ("pong", 8, False, (1, 16, 16, 6, 1, 128)),
        ("pong", 16, False, (3, 16, 48, 11, 1, 256)),
        ("pong", 64, False, (15, 14, 200, 41, 1, 512)),
        ("pong", 192, False, (40, 5, 200, 64, 1, 512)),
        ("pong", 2, True, (1, 16, 16, 1, 1, 512)),
        ("pong", 4, True, (2, 16, 32, 1, 1, 512)),
        ("pong", 16, True, (9, 16, 144, 1, 5, 512)),  # 16 - trainer - writer - 5 loaders
        ("pong", 64, True, (50, 4, 200, 1, 8, 512)),
        ("atari", 1, False, (1, 64, 64, 1, 1, 512)),
        ("atari", 2, False, (1, 64, 64, 1, 1, 512)),
        ("atari", 4, False, (2, 64, 128, 2, 1, 512)),
        ("atari", 16, False, (8, 64, 512, 6, 1, 512)),  # 16 - 8 - 2 for replay, loader and evaluator
        ("atari", 64, False, (32, 32, 1_000, 24, 1, 512)),
        ("atari", 192, False, (91, 11, 1_000, 64, 1, 512)),
        ("atari", 1, True, (1, 64, 64, 1, 1, 512)),
        ("atari", 2, True, (1, 64, 64, 1, 1, 512)),
        ("atari", 4, True, (2, 64, 128, 1, 1, 512)),
        ("atari", 8, True, (4, 64, 256, 1, 2, 512)),
        ("atari", 16, True, (9, 64, 576, 1, 5, 512)),
        ("atari", 64, True, (53, 19, 1_000, 1, 8, 512)),
        ("atari", 192, True, (167, 6, 1_000, 1, 8, 512)),
        ("paper", 2, False, (1, 360, 360, 1, 1, 512)),
        ("paper", 16, True, (9, 40, 360, 1, 5, 512)),
    ],
)
@pytest.mark.parametrize("gib", [288, 512])  # Beyond that, memory affects only the size of the replay memory.
def test_each_preset_is_sized_to_the_machine(preset, cores, gpu, expected, gib):
    result = sized(PRESETS[preset].config, machine(cores, gib=gib, gpu=gpu))
    learner = result.learner
    assert (*layout(result), learner.num_loaders, learner.batch_size) == expected


@pytest.mark.parametrize(("gib", "envs"), [(23.9, 16), (24, 64)])
def test_the_full_network_has_more_environments_if_the_memory_suffices(gib, envs):
    assert layout(sized(PRESETS["atari"].config, machine(16, gib=gib)))[:3] == (8, envs, 8 * envs)


# Cores


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", range(1, 130))
def test_actors_and_learner_use_at_most_all_cores_or_two(cores, gpu):
    processes, _, _, threads = layout(sized(box=machine(cores, gpu=gpu)))
    assert processes >= 1
    assert threads >= 1
    assert processes + threads <= max(2, cores)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", [2, 4, 16, 64])
@pytest.mark.parametrize("num_actors", [1, 2, 5, 16, 17, 33, 360, 1000])
def test_configured_actors_leave_no_process_idle(num_actors, cores, gpu):
    processes, envs, actual, _ = layout(sized(config(num_actors=num_actors), machine(cores, gpu=gpu)))
    assert actual == num_actors
    assert (processes - 1) * envs < num_actors <= processes * envs
    assert processes <= layout(sized(box=machine(cores, gpu=gpu)))[0]


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {"num_actors": 1}, (1, 1, 1, 1)),
        (64, {"num_actors": 1}, (1, 1, 1, 55)),  # The learner gets the cores that actors do not use.
        (4, {"num_actors": 5}, (2, 3, 5, 2)),
        (16, {"num_actors": 5}, (5, 1, 5, 9)),
        (8, {"num_actors": 5}, (3, 2, 5, 4)),  # Four processes of two would leave one without an actor.
        (64, {"num_actors": 1024}, (32, 32, 1024, 24)),
        (8, {"num_processes": 3}, (3, 64, 192)),
        (8, {"envs_per_process": 5}, (4, 5, 20)),
        (8, {"num_processes": 3, "envs_per_process": 5}, (3, 5, 15)),
        (8, {"num_actors": 10, "num_processes": 3}, (3, 4, 10)),
        (8, {"num_actors": 10, "envs_per_process": 2}, (5, 2, 10)),
        # The other six actors are on other hosts.
        (8, {"num_actors": 10, "num_processes": 2, "envs_per_process": 2}, (2, 2, 10)),
        (8, {"num_actors": 2, "num_processes": 3}, (3, 1, 2)),
    ],
)
def test_configured_sizes_stay_and_determine_the_others(cores, settings, expected):
    assert layout(sized(config(**settings), machine(cores)))[: len(expected)] == expected


def test_threads_of_an_actor_process_count_as_cores():
    assert layout(sized(config(num_threads=0), machine(16)))[0] == 8
    tree = Config(actor=ActorConfig(num_threads=4))
    assert layout(sized(tree, machine(16))) == (2, 64, 128, 6)
    assert layout(sized(tree, machine(2))) == (1, 64, 64, 1)


def test_configured_sizes_and_an_unused_gpu_are_respected():
    gpu = machine(64, gpu=True)
    for box in (machine(64), gpu):
        assert sized(config(num_threads=3), box).learner.num_threads == 3
        assert sized(config(batch_size=48), box).learner.batch_size == 48
    assert layout(sized(config(device="cpu"), gpu)) == layout(sized(box=machine(64)))
    assert sized(config(batch_size=128), machine(64)).learner.num_threads == 16
    assert sized(config(batch_size=1), machine(64)).learner.num_threads == 1


def test_samplers_and_loaders_take_cores_from_actors_with_a_gpu():
    box = machine(16, gpu=True)
    assert layout(sized(config(replay={"num_samplers": 3}), box))[0] == 9  # loaders draw instead of samplers
    apart = replace(config(replay={"num_samplers": 3}), transport=TransportConfig(shared_memory=False))
    assert layout(sized(apart, box))[0] == 8  # Half, as 5 loaders and 3 samplers would leave 6.
    assert layout(sized(replace(apart, learner=LearnerConfig(num_loaders=1)), box))[0] == 10


@pytest.mark.parametrize(
    ("samples_per_insert", "processes"),
    [(0.25, 8), (2.5, 8), (7.5, 4), (17.5, 2), (250.0, 1)],  # An insert costs as much as 2.5 samples.
)
def test_actors_that_wait_for_samples_get_fewer_cores(samples_per_insert, processes):
    ratio = {"samples_per_insert": samples_per_insert}
    assert layout(sized(config(replay={**ratio, "inserts_wait": True}), machine(16)))[0] == processes
    assert layout(sized(config(replay=ratio), machine(16)))[0] == 8
    assert layout(sized(config(replay={**ratio, "inserts_wait": True}), machine(16, gpu=True)))[0] == 9


@pytest.mark.parametrize(
    ("cores", "samples_per_insert", "threads"),
    [(1, 15.0, 1), (2, 1.25, 1), (2, 15.0, 2), (4, 7.5, 3), (4, 22.5, 4), (8, 15.0, 6), (16, 15.0, 12)],
)
def test_the_learner_uses_the_cores_of_waiting_actors(cores, samples_per_insert, threads):
    ratio = {"samples_per_insert": samples_per_insert}
    assert sized(config(replay={**ratio, "inserts_wait": True}), machine(cores)).learner.num_threads == threads
    actors = layout(sized(config(replay=ratio), machine(cores)))[0]
    assert sized(config(replay=ratio), machine(cores)).learner.num_threads == max(1, cores - actors - cores // 8)
    assert sized(config(replay={**ratio, "inserts_wait": True}), machine(cores, gpu=True)).learner.num_threads == 1


@pytest.mark.parametrize(
    ("cores", "algorithm", "threads"), [(1, "", 1), (2, "", 2), (16, "dpg", 2), (16, "my:own", 13)]
)
def test_dpg_uses_at_most_two_threads(cores, algorithm, threads):
    schema = replace(vectors(), num_actions=0, action_size=3)
    tree = config(batch_size=256, replay={"samples_per_insert": 64.0, "inserts_wait": True})
    assert sized(replace(tree, algorithm=algorithm), machine(cores), schema).learner.num_threads == threads


@pytest.mark.parametrize(("capacity", "expected"), [(60_000, 60), (600_000, 512), (50_000, 50)])
def test_the_capacity_limits_the_number_of_actors(capacity, expected):
    assert layout(sized(config(replay={"capacity": capacity}), machine(16)))[2] == expected


# batch size and number format


@pytest.mark.parametrize(
    ("cores", "gpu", "num_threads", "narrow", "wide"),
    [
        (2, False, 0, 64, 32),
        (16, False, 0, 128, 64),  # 6 threads
        (32, False, 0, 256, 128),  # 12
        (64, False, 0, 512, 256),  # 24
        (192, False, 0, 512, 512),
        (16, False, 8, 256, 128),
        (2, False, 64, 64, 32),  # Threads above the number of cores do not enlarge the batch.
        (64, False, 1, 64, 32),
        (2, True, 0, 512, 512),
        (64, True, 0, 512, 512),
    ],
)
def test_the_batch_follows_threads_and_network_width(cores, gpu, num_threads, narrow, wide):
    tree = config(batch_size=0, num_threads=num_threads)
    for width, batch in ((0.25, narrow), (0.49, narrow), (0.5, wide), (1.0, wide)):
        result = sized(replace(tree, network=NetworkConfig(width=width)), machine(cores, gpu=gpu))
        assert result.learner.batch_size == batch


def test_a_custom_network_counts_as_wide_and_a_vector_network_as_narrow():
    tree = config(batch_size=0)
    own = replace(tree, network=NetworkConfig(factory="my.networks:small", width=0.25))
    assert sized(own).learner.batch_size == 32
    assert sized(tree, schema=vectors()).learner.batch_size == 64


def test_the_batch_is_at_most_the_minimum_size_to_sample():
    many = machine(64)
    assert sized(config(batch_size=0, replay={"min_size_to_sample": 100}), many).learner.batch_size == 64
    assert sized(config(batch_size=0, replay={"min_size_to_sample": 1})).learner.batch_size == 1


AUTO, BOTH = {"bfloat16": "auto"}, {"cpu_bfloat16": True}


@pytest.mark.parametrize(
    ("learner", "network", "schema", "formats", "expected"),
    [
        ({**AUTO, "device": "cpu"}, {}, images(), {}, ("off", "unsupported")),
        ({**AUTO, "device": "cpu"}, {}, images(), BOTH, ("on", "supported")),
        (AUTO, {}, images(), {}, ("on", "supported")),
        (AUTO, {}, images(), {"gpu_bfloat16": False, "cpu_bfloat16": True}, ("off", "unsupported")),
        ({"bfloat16": "off"}, {}, images(), BOTH, ("off", "configured")),
        ({"bfloat16": "on"}, {}, images(), {}, ("on", "configured")),
        ({"bfloat16": "on", "device": "cpu"}, {}, images(), {}, ("on", "emulated")),
        ({**AUTO, "device": "cpu"}, {"width": 0.25}, images(), BOTH, ("off", "small_network")),
        ({**AUTO, "device": "cpu"}, {"width": 0.5}, images(), BOTH, ("on", "supported")),
        ({**AUTO, "device": "cuda"}, {"width": 0.25}, images(), BOTH, ("on", "supported")),
        ({**AUTO, "device": "cpu"}, {"width": 0.25, "factory": "mine:network"}, images(), BOTH, ("on", "supported")),
        ({**AUTO, "device": "cpu"}, {}, vectors(), BOTH, ("off", "small_network")),
        (AUTO, {}, replace(vectors(), num_actions=0, action_size=2), BOTH, ("off", "small_critics")),
    ],
)
def test_the_number_format_follows_hardware_and_network(learner, network, schema, formats, expected):
    tree = Config(learner=LearnerConfig(**learner), network=NetworkConfig(**network))
    result = size(tree, machine(gpu=True, **formats), schema)
    assert (result.config.learner.bfloat16, result.format) == expected


# Memory

LZ4_VECTORS = replace(vectors(), codec="lz4")
SEQUENCES = replace(vectors(), sequence_length=80, sequence_period=40, state_size=8)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (images(84), 1_400),
        (images(168), 5_600),
        (images(42), 350),
        (images(codec="raw"), -(-(64 * (84 * 84 + 4) + 4 + 8) // 50)),
        # 50 steps: 50 + 1 for the stack + 3 for the open window + 7 for the ends of episodes of 8, rounded up.
        (vectors(100), -(-(61 * (400 + 4) + 4 + 8) // 50)),
        (LZ4_VECTORS, -(-(61 * (LZ4_VECTORS.table.max_entry_bytes + 4) + 4 + 8) // 50)),
        # 50 steps are 1.25 sequences, with the frames of one more: (50 + 80) / 1.25.
        (SEQUENCES, 104 * (SEQUENCES.table.max_entry_bytes + 4) + 8),
        (replace(SEQUENCES, frame_shape=(84, 84), frame_dtype="uint8", codec="lz4"), 104 * 1_400),
    ],
)
def test_bytes_of_pixels_follow_the_area_and_others_are_exact(schema, expected):
    assert bytes_per_transition(Config(), schema) == expected


def test_a_replay_memory_holds_a_segment_of_sequences():
    """50 steps may complete two sequences, and the end of an episode one more."""
    each = bytes_per_transition(Config(), SEQUENCES)
    assert sized(config(replay={"max_bytes": 3 * each}), schema=SEQUENCES).replay.max_bytes == 3 * each
    with pytest.raises(ConfigError):
        sized(config(replay={"max_bytes": 2 * each}), schema=SEQUENCES)


@pytest.mark.parametrize("capacity", [50_000, 65_536, 65_537, 2_000_000])
@pytest.mark.parametrize("actions", [{}, {"num_actions": 0, "action_size": 3}, {"num_actions": 90, "masked": True}])
def test_the_tables_are_those_of_the_store(capacity, actions):
    schema = replace(vectors(), **actions)
    tables = table_bytes(config(replay={"capacity": capacity}), schema)
    rest = Sizes(capacity, 0, num_streams=360).file_bytes(schema.table) - tables
    assert 0 <= rest < 2**20  # header, streams, whole pages


def test_each_shard_has_tables_for_its_share():
    sharded = config(replay={"capacity": 131_074, "num_shards": 2})
    assert table_bytes(sharded, images()) == 2 * (65_537 * (56 + 8) + 2 * 131_072 * 8)


def test_each_shard_takes_cores_for_its_writer_and_samplers():
    tree = replace(config(envs_per_process=16), replay=replace(Config().replay, num_shards=4))
    assert layout(sized(tree, machine(20, gpu=True)))[0] == 10  # Half, as 4 writers and 6 loaders would leave 9.
    assert layout(sized(tree, machine(64, gpu=True)))[0] == 64 - 1 - 8 - 4  # trainer, loaders, writers
    sockets = replace(tree, transport=replace(tree.transport, shared_memory=False))
    samplers = tree.replay.num_samplers
    assert layout(sized(sockets, machine(64, gpu=True)))[0] == 64 - 1 - 8 - 4 * (1 + samplers)


def test_more_shards_than_chosen_actors_are_refused():
    tree = replace(config(envs_per_process=1), replay=replace(Config().replay, num_shards=2))
    with pytest.raises(ConfigError, match=r"actor\.num_actors 1 must be >= replay\.num_shards 2"):
        sized(tree)


def test_replay_gets_the_bytes_of_its_capacity_or_half_of_the_memory():
    assert sized().replay.max_bytes == 2_000_000 * 1_400
    result = sized(box=machine(gib=4))
    assert result.replay.max_bytes + table_bytes(result, images()) == 2 * GIB
    for configured in (123_456_789, 20 * GIB):
        assert sized(config(replay={"max_bytes": configured})).replay.max_bytes == configured


def test_the_replay_memory_may_take_all_memory_but_not_more():
    tables = table_bytes(Config(), images())
    room = 24 * GIB - tables
    assert sized(config(replay={"max_bytes": room})).replay.max_bytes == room
    with pytest.raises(ConfigError, match=r"24\.0 GiB.*24\.0 GiB.*154 MiB.*2,000,000") as error:
        sized(config(replay={"max_bytes": room + 1}))
    assert "replay.max_bytes" in error.value.remedy


@pytest.mark.parametrize(
    ("replay", "gib", "names"),
    [
        ({"capacity": 2_000_000, "min_size_to_sample": 1_000_000}, 2, ["1.5 GiB", "1,000,000", "1.0 GiB"]),
        ({"capacity": 2**31}, 24, ["160.1 GiB", "2,147,483,648", "12.0 GiB"]),
        ({"max_bytes": 1_400 * 49}, 24, ["68,600", "49", "50"]),
    ],
)
def test_a_replay_memory_that_could_never_be_used_is_refused(replay, gib, names):
    with pytest.raises(ConfigError) as error:
        sized(config(replay=replay), machine(gib=gib))
    assert [name for name in names if name not in error.value.problem] == []
    assert "replay." in error.value.remedy


@pytest.mark.parametrize("fields", [{"cores": 0}, {"memory_bytes": 0}])
def test_a_machine_has_cores_and_memory(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}=0"):
        Machine(**{"cores": 1, "memory_bytes": 1, "gpu": False, **fields})


# The whole


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_actors", [0, 1, 5, 1000])
@pytest.mark.parametrize("preset", ["pong", "paper"])
def test_sizing_twice_changes_nothing(cores, gpu, num_actors, preset):
    box, tree = machine(cores, gpu=gpu), PRESETS[preset].config
    once = sized(replace(tree, actor=replace(tree.actor, num_actors=num_actors)), box)
    assert sized(once, box) == once


def test_other_settings_stay():
    tree = Config(seed=5)
    result = sized(tree)
    assert replace(result, actor=tree.actor, learner=tree.learner, replay=tree.replay) == tree
    free = {"num_actors": 0, "num_processes": 0, "envs_per_process": 0}
    assert replace(result.actor, **free) == tree.actor
    assert replace(result.learner, num_threads=0, num_loaders=0) == tree.learner  # The batch size is the paper's.
    assert replace(result.replay, max_bytes=0) == tree.replay


def test_the_reasons_have_the_figures():
    small, large = size(), size(box=machine(16, gib=4, gpu=True))
    assert (small.on_gpu, small.actor_cores, small.transition_bytes, small.idle) == (False, 1, 1_400, None)
    assert (small.table_bytes, small.replay_host_bytes) == (table_bytes(Config(), images()), 24 * GIB)
    assert (large.on_gpu, large.actor_cores, large.busy_cores) == (True, 9, 9)
    waiting = size(config(replay={"samples_per_insert": 17.5, "inserts_wait": True}))
    assert (waiting.actor_cores, waiting.busy_cores) == (1, 0.25)


@pytest.mark.parametrize(
    ("tree", "cores", "gpu", "idle"),
    [
        (PRESETS["pong"].config, 128, True, IdleCores(17, "capacity")),
        (config(num_actors=100), 192, True, IdleCores(81, "num_actors")),
        (PRESETS["pong"].config, 192, False, IdleCores(85, "batch_size")),
        *((tree, cores, gpu, None) for tree in (Config(), config(num_processes=1)) for cores in (1, 2, 4, 16, 64)
          for gpu in (False, True)),
        (replace(PRESETS["pong"].config, algorithm="my:own"), 192, False, IdleCores(85, "batch_size")),
    ],
)  # fmt: skip
def test_idle_cores_of_a_large_machine_name_the_limiting_setting(tree, cores, gpu, idle):
    assert size(tree, machine(cores, gib=512, gpu=gpu)).idle == idle


def test_no_setting_gives_dpg_more_cores():
    schema = replace(vectors(), num_actions=0, action_size=3)
    tree, box = PRESETS["control"].config, machine(64, gib=512)
    assert size(tree, box, schema).idle is None
    assert size(replace(tree, algorithm="my:own"), box, schema).idle is not None


def test_cuda_without_a_gpu_is_refused():
    tree = Config(learner=LearnerConfig(device="cuda"))
    with pytest.raises(ConfigError, match="--device cuda") as error:
        sized(tree)
    assert "--device cpu" in error.value.remedy
    assert sized(tree, machine(gpu=True)).learner.device == "cuda"


@pytest.mark.parametrize(("gpu", "asked", "loaders"), [(False, 0, 1), (True, 0, 5), (False, 3, 3), (True, 1, 1)])
def test_a_gpu_gets_more_loaders(gpu, asked, loaders):
    tree = Config(learner=LearnerConfig(num_loaders=asked))
    assert sized(tree, machine(cores=16, gpu=gpu)).learner.num_loaders == loaders


# a replay server on another host


def test_the_memory_of_the_replay_host_limits_the_replay_memory():
    small, large = machine(gib=1), 64 * GIB
    apart = sized(config(replay={"host_bytes": large}), small)
    assert apart.replay.max_bytes == sized(box=machine(gib=64)).replay.max_bytes > sized(box=small).replay.max_bytes
    given = {"host_bytes": large, "max_bytes": 40 * GIB}
    assert sized(config(replay=given), small).replay.max_bytes == 40 * GIB
    with pytest.raises(ConfigError, match=r"65\.2 GiB.*64\.0 GiB"):
        sized(config(replay={**given, "max_bytes": 65 * GIB}), machine(gib=512))


def test_a_head_reserves_no_core_for_actors():
    tree = config(num_actors=64, batch_size=0, device="cpu")
    head = replace(tree, run=RunConfig(head=True))
    alone, beside = sized(head, machine(16)), sized(tree, machine(16))
    assert layout(alone) == (0, 16, 64, 14)
    assert alone.learner.num_threads > beside.learner.num_threads
    assert sized(alone, machine(16)) == alone
    assert sized(replace(head, actor=ActorConfig(num_actors=2))).actor.envs_per_process == 2


def test_the_chosen_batch_is_a_multiple_of_the_shards():
    tree = config(batch_size=0, replay={"num_shards": 3}, num_actors=6)
    assert sized(tree, machine(2)).learner.batch_size % 3 == 0
    assert sized(tree, machine(64)).learner.batch_size % 3 == 0
