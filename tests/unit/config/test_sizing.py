"""Claims about `apex.config.sizing`: which values replace 0, "chosen for this machine", on simulated machines."""

from dataclasses import replace

import pytest

from apex.config import ActorConfig, Config, LearnerConfig, NetworkConfig, ReplayConfig, RunConfig, TransportConfig
from apex.config.presets import NARROW, PRESETS
from apex.config.sizing import Machine, bytes_per_transition, explain, size_to_machine, table_bytes
from apex.errors import ConfigError
from apex.replay_memory.store.layout import Sizes
from apex.types import Schema

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


def sized(tree=None, box=None, schema=None):
    return size_to_machine(tree or Config(), box or machine(), schema or images())


def layout(result):
    actor = result.actor
    return actor.num_processes, actor.envs_per_process, actor.num_actors, result.learner.num_threads


# The whole rule, for the presets that leave all to it


@pytest.mark.parametrize(
    ("preset", "cores", "gpu", "expected"),
    [  # processes, environments of each, actors; the learner's threads, loaders, batch
        ("pong", 1, False, (1, 16, 16, 1, 1, 64)),
        ("pong", 2, False, (1, 16, 16, 2, 1, 64)),  # Its actors wait for the most part.
        ("pong", 4, False, (1, 16, 16, 3, 1, 64)),
        ("pong", 8, False, (1, 16, 16, 6, 1, 128)),
        ("pong", 16, False, (3, 16, 48, 11, 1, 256)),
        ("pong", 64, False, (15, 14, 200, 41, 1, 512)),
        ("pong", 192, False, (40, 5, 200, 64, 1, 512)),
        ("pong", 2, True, (1, 16, 16, 1, 1, 512)),
        ("pong", 4, True, (2, 16, 32, 1, 1, 512)),
        ("pong", 16, True, (9, 16, 144, 1, 5, 512)),  # 16 - trainer - writer - 5 loaders
        ("pong", 64, True, (50, 4, 200, 1, 8, 512)),
        ("atari", 1, False, (1, 16, 16, 1, 1, 512)),
        ("atari", 2, False, (1, 16, 16, 1, 1, 512)),
        ("atari", 4, False, (2, 16, 32, 2, 1, 512)),
        ("atari", 16, False, (8, 16, 128, 6, 1, 512)),  # 16 - 8 - 2 for replay, loader and evaluator
        ("atari", 64, False, (32, 16, 512, 24, 1, 512)),
        ("atari", 192, False, (91, 11, 1_000, 64, 1, 512)),
        ("atari", 1, True, (1, 16, 16, 1, 1, 512)),
        ("atari", 2, True, (1, 16, 16, 1, 1, 512)),
        ("atari", 4, True, (2, 16, 32, 1, 1, 512)),
        ("atari", 8, True, (4, 16, 64, 1, 2, 512)),
        ("atari", 16, True, (9, 16, 144, 1, 5, 512)),
        ("atari", 64, True, (54, 16, 864, 1, 8, 512)),
        ("atari", 192, True, (167, 6, 1_000, 1, 8, 512)),
        ("paper", 2, False, (1, 360, 360, 1, 1, 512)),
        ("paper", 16, True, (9, 40, 360, 1, 5, 512)),
    ],
)
@pytest.mark.parametrize("gib", [8, 512])  # Memory decides what replay holds, and nothing else.
def test_a_machine_gets_what_it_bears(preset, cores, gpu, expected, gib):
    result = sized(PRESETS[preset].config, machine(cores, gib=gib, gpu=gpu))
    learner = result.learner
    assert (*layout(result), learner.num_loaders, learner.batch_size) == expected


# Cores


@pytest.mark.parametrize(
    ("cores", "gpu", "processes", "threads"),
    [
        (1, False, 1, 1),
        (2, False, 1, 1),
        (4, False, 2, 2),
        (16, False, 8, 6),  # 16 - 8 - 2 for replay, loaders and evaluator
        (64, False, 32, 24),  # 64 - 32 - 8
        (1, True, 1, 1),
        (2, True, 1, 1),
        (4, True, 2, 1),
        (16, True, 9, 1),  # 16 - trainer - 5 loaders - writer
        (64, True, 54, 1),
    ],
)
def test_the_cores_are_shared_out(cores, gpu, processes, threads):
    assert layout(sized(box=machine(cores, gpu=gpu))) == (processes, 16, 16 * processes, threads)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", range(1, 130))
def test_actors_and_learner_never_want_more_cores_than_two_or_what_there_is(cores, gpu):
    processes, _, _, threads = layout(sized(box=machine(cores, gpu=gpu)))
    assert processes >= 1
    assert threads >= 1
    assert processes + threads <= max(2, cores)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", [2, 4, 16, 64])
@pytest.mark.parametrize("num_actors", [1, 2, 5, 16, 17, 33, 360, 1000])
def test_a_given_number_of_actors_is_covered_without_an_idle_process(num_actors, cores, gpu):
    processes, envs, actual, _ = layout(sized(config(num_actors=num_actors), machine(cores, gpu=gpu)))
    assert actual == num_actors
    assert (processes - 1) * envs < num_actors <= processes * envs
    assert processes <= layout(sized(box=machine(cores, gpu=gpu)))[0]


@pytest.mark.parametrize(
    ("cores", "num_actors", "expected"),
    [
        (2, 1, (1, 1, 1, 1)),
        (64, 1, (1, 1, 1, 55)),  # What actors do not take, the learner may.
        (2, 5, (1, 5, 5, 1)),
        (4, 5, (2, 3, 5, 2)),
        (16, 5, (5, 1, 5, 9)),
        (8, 5, (3, 2, 5, 4)),  # Four processes of two would leave one without an actor.
        (2, 40, (1, 40, 40, 1)),
        (4, 40, (2, 20, 40, 2)),
        (64, 1024, (32, 32, 1024, 24)),
    ],
)
def test_a_given_number_of_actors_is_spread_evenly(cores, num_actors, expected):
    assert layout(sized(config(num_actors=num_actors), machine(cores))) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_processes": 3}, (3, 16, 48)),
        ({"envs_per_process": 5}, (4, 5, 20)),
        ({"num_processes": 3, "envs_per_process": 5}, (3, 5, 15)),
        ({"num_actors": 10, "num_processes": 3}, (3, 4, 10)),
        ({"num_actors": 10, "envs_per_process": 2}, (5, 2, 10)),
        ({"num_actors": 10, "num_processes": 2, "envs_per_process": 2}, (2, 2, 10)),  # The others are on other hosts.
        ({"num_actors": 2, "num_processes": 3}, (3, 1, 2)),
    ],
)
def test_what_was_set_stays_and_the_rest_follows(settings, expected):
    assert layout(sized(config(**settings), machine(8)))[:3] == expected


def test_threads_of_an_actor_process_count_as_cores():
    assert layout(sized(config(num_threads=0), machine(16)))[0] == 8
    tree = Config(actor=ActorConfig(num_threads=4))
    assert layout(sized(tree, machine(16))) == (2, 16, 32, 6)
    assert layout(sized(tree, machine(2))) == (1, 16, 16, 1)


def test_the_learners_threads_stay_when_they_are_set():
    assert sized(config(num_threads=3), machine(64)).learner.num_threads == 3
    assert sized(config(num_threads=3), machine(64, gpu=True)).learner.num_threads == 3


def test_a_small_batch_gets_few_threads():
    assert sized(config(batch_size=128), machine(64)).learner.num_threads == 16
    assert sized(config(batch_size=1), machine(64)).learner.num_threads == 1


def test_a_gpu_that_the_learner_may_not_use_changes_nothing():
    box = machine(16, gpu=True)
    assert layout(sized(config(device="cpu"), box)) == layout(sized(box=machine(16)))


def test_samplers_and_loaders_take_cores_from_actors_beside_a_gpu():
    box = machine(16, gpu=True)
    assert layout(sized(config(replay={"num_samplers": 3}), box))[0] == 9  # The loaders draw for themselves.
    apart = replace(config(replay={"num_samplers": 3}), transport=TransportConfig(shared_memory=False))
    assert layout(sized(apart, box))[0] == 8  # Half, as 5 loaders and 3 samplers would leave 6.
    assert layout(sized(replace(apart, learner=LearnerConfig(num_loaders=1)), box))[0] == 10


@pytest.mark.parametrize(
    ("samples_per_insert", "processes"),
    [(0.25, 8), (2.5, 8), (7.5, 4), (17.5, 2), (250.0, 1)],  # An insert costs as much as 2.5 samples.
)
def test_actors_that_wait_for_samples_leave_their_cores_to_the_learner(samples_per_insert, processes):
    ratio = {"samples_per_insert": samples_per_insert}
    assert layout(sized(config(replay={**ratio, "inserts_wait": True}), machine(16)))[0] == processes
    assert layout(sized(config(replay=ratio), machine(16)))[0] == 8
    assert layout(sized(config(replay={**ratio, "inserts_wait": True}), machine(16, gpu=True)))[0] == 9


@pytest.mark.parametrize(
    ("cores", "samples_per_insert", "threads"),
    [(1, 15.0, 1), (2, 1.25, 1), (2, 15.0, 2), (4, 7.5, 3), (4, 22.5, 4), (8, 15.0, 6), (16, 15.0, 12)],
)
def test_the_learner_computes_on_the_cores_of_actors_that_wait_for_it(cores, samples_per_insert, threads):
    ratio = {"samples_per_insert": samples_per_insert}
    assert sized(config(replay={**ratio, "inserts_wait": True}), machine(cores)).learner.num_threads == threads
    actors = layout(sized(config(replay=ratio), machine(cores)))[0]
    assert sized(config(replay=ratio), machine(cores)).learner.num_threads == max(1, cores - actors - cores // 8)
    assert sized(config(replay={**ratio, "inserts_wait": True}), machine(cores, gpu=True)).learner.num_threads == 1


def test_explains_why_there_are_more_threads_than_cores():
    tree = config(replay={"samples_per_insert": 17.5, "inserts_wait": True})
    assert explain(tree, machine(2), images())[2] == (
        "learner: 2 threads; actors use 1 core, busy 25% of the time; replay, 1 loader and evaluator "
        "share the rest of 2 cores"
    )
    assert "busy" not in "\n".join(explain(tree, machine(16, gpu=True), images()))


@pytest.mark.parametrize(("capacity", "expected"), [(60_000, 60), (160_000, 128), (50_000, 50)])
def test_the_memory_holds_a_game_of_every_actor(capacity, expected):
    assert layout(sized(config(replay={"capacity": capacity}), machine(16)))[2] == expected


# The batch and its numbers


@pytest.mark.parametrize(
    ("cores", "gpu", "num_threads", "narrow", "wide"),
    [
        (2, False, 0, 64, 32),
        (16, False, 0, 128, 64),  # 6 threads
        (32, False, 0, 256, 128),  # 12
        (64, False, 0, 512, 256),  # 24
        (192, False, 0, 512, 512),
        (16, False, 8, 256, 128),
        (2, False, 64, 64, 32),  # Threads beyond the cores make no update wider.
        (64, False, 1, 64, 32),
        (2, True, 0, 512, 512),
        (64, True, 0, 512, 512),
    ],
)
def test_a_batch_by_the_machine_follows_its_threads_and_the_networks_width(cores, gpu, num_threads, narrow, wide):
    tree = config(batch_size=0, num_threads=num_threads)
    for width, batch in ((0.25, narrow), (0.49, narrow), (0.5, wide), (1.0, wide)):
        result = sized(replace(tree, network=NetworkConfig(width=width)), machine(cores, gpu=gpu))
        assert result.learner.batch_size == batch


def test_a_network_of_ones_own_counts_as_wide_and_one_for_vectors_as_narrow():
    tree = config(batch_size=0)
    own = replace(tree, network=NetworkConfig(factory="my.networks:small", width=0.25))
    assert sized(own).learner.batch_size == 32
    assert sized(tree, schema=vectors()).learner.batch_size == 64


def test_without_a_gpu_other_games_get_batches_of_32_and_two_threads_on_two_cores():
    learner = sized(NARROW).learner
    assert (learner.batch_size, learner.num_threads) == (32, 2)
    assert sized(NARROW, machine(16)).learner.batch_size == 128


def test_a_batch_is_never_larger_than_what_is_there_when_sampling_begins():
    many = machine(64)
    assert sized(config(batch_size=0, replay={"min_size_to_sample": 100}), many).learner.batch_size == 64
    assert sized(config(batch_size=0, replay={"min_size_to_sample": 1})).learner.batch_size == 1


def test_a_batch_that_was_asked_for_stays():
    assert sized(config(batch_size=48), machine(64, gpu=True)).learner.batch_size == 48


def test_continuous_actions_are_learned_in_float32_on_every_machine():
    tree = Config(learner=LearnerConfig(bfloat16="auto", device="cuda"))
    continuous, box = replace(vectors(), num_actions=0, action_size=2), machine(gpu=True)
    assert sized(tree, box, schema=continuous).learner.bfloat16 == "off"
    assert any("float32: policy and critics are too small" in line for line in explain(tree, box, continuous))


@pytest.mark.parametrize(
    ("asked", "device", "formats", "expected"),
    [
        ("auto", "cpu", {}, ("off", "float32: this CPU does not support bfloat16")),
        ("auto", "cpu", {"cpu_bfloat16": True}, ("on", "bfloat16: this CPU supports it")),
        ("auto", "auto", {}, ("on", "bfloat16: this GPU supports it")),
        (
            "auto",
            "cuda",
            {"gpu_bfloat16": False, "cpu_bfloat16": True},
            ("off", "float32: this GPU does not support bfloat16"),
        ),
        ("off", "auto", {"cpu_bfloat16": True}, ("off", "float32")),
        ("on", "auto", {}, ("on", "bfloat16")),
        (
            "on",
            "cpu",
            {},
            ("on", "bfloat16, which is slow on this CPU: set --learner.bfloat16 off"),
        ),
    ],
)
def test_the_learner_computes_in_what_its_hardware_has_and_says_why(asked, device, formats, expected):
    tree = Config(learner=LearnerConfig(bfloat16=asked, device=device))
    box = machine(gpu=True, **formats)
    said = next(line for line in explain(tree, box, images()) if "batches of" in line)
    assert (sized(tree, box).learner.bfloat16, said) == (expected[0], f"  batches of 512; {expected[1]}")


@pytest.mark.parametrize(
    ("network", "device", "schema", "expected"),
    [
        ({"width": 0.25}, "cpu", images(), "off"),
        ({"width": 0.5}, "cpu", images(), "on"),
        ({"width": 0.25}, "cuda", images(), "on"),
        ({"width": 0.25, "factory": "mine:network"}, "cpu", images(), "on"),  # Its width is its own.
        ({}, "cpu", vectors(4), "off"),
    ],
)
def test_a_network_that_is_too_small_for_a_processors_bfloat16_computes_in_float32(network, device, schema, expected):
    tree = Config(learner=LearnerConfig(bfloat16="auto", device=device), network=NetworkConfig(**network))
    box = machine(gpu=True, cpu_bfloat16=True)
    assert size_to_machine(tree, box, schema).learner.bfloat16 == expected
    said = any("slower for a network of this size" in line for line in explain(tree, box, schema))
    assert said == (expected == "off")


# Memory


@pytest.mark.parametrize(("size", "expected"), [(84, 1_400), (168, 5_600), (42, 350)])
def test_compressed_pixels_are_guessed_by_area(size, expected):
    assert bytes_per_transition(Config(), images(size)) == expected


def test_vectors_are_reckoned_by_the_frames_of_a_full_segment():
    # 50 steps: 50 + 1 for the stack + 3 for the open window + 7 for the ends of episodes of 8, rounded up.
    assert bytes_per_transition(Config(), vectors(100)) == -(-(61 * (400 + 4) + 4 + 8) // 50)


def test_pixels_that_are_not_compressed_are_reckoned_in_full():
    assert bytes_per_transition(Config(), images(codec="raw")) == -(-(64 * (84 * 84 + 4) + 4 + 8) // 50)


def test_vectors_under_lz4_are_reckoned_at_its_bound():
    schema = replace(vectors(), codec="lz4")
    assert bytes_per_transition(Config(), schema) == -(-(61 * (schema.max_frame_bytes + 4) + 4 + 8) // 50)


def test_the_tables_hold_a_record_each_and_a_tree_of_twice_the_next_power_of_two():
    assert table_bytes(config(replay={"capacity": 60_000}), images()) == 60_000 * 56 + 2 * 65_536 * 8
    assert table_bytes(config(replay={"capacity": 65_536}), images()) == 65_536 * 56 + 2 * 65_536 * 8


@pytest.mark.parametrize("capacity", [50_000, 65_536, 65_537, 2_000_000])
@pytest.mark.parametrize("actions", [{}, {"num_actions": 0, "action_size": 3}, {"num_actions": 90, "masked": True}])
def test_the_tables_are_those_of_the_store(capacity, actions):
    schema = replace(vectors(), **actions)
    tables = table_bytes(config(replay={"capacity": capacity}), schema)
    rest = Sizes(capacity, 0, num_streams=360).file_bytes(schema) - tables
    assert 0 <= rest < 2**20  # header, streams, whole pages


def test_each_shard_has_tables_for_its_share():
    sharded = config(replay={"capacity": 131_074, "num_shards": 2})
    assert table_bytes(sharded, images()) == 2 * (65_537 * 56 + 2 * 131_072 * 8)


def test_each_shard_takes_a_core_for_its_writer_and_for_its_samplers_where_loaders_do_not_draw():
    tree = replace(Config(), replay=replace(Config().replay, num_shards=4))
    assert layout(sized(tree, machine(20, gpu=True)))[0] == 10  # Half, as 4 writers and 6 loaders would leave 9.
    assert layout(sized(tree, machine(64, gpu=True)))[0] == 64 - 1 - 8 - 4  # trainer, loaders, writers
    sockets = replace(tree, transport=replace(tree.transport, shared_memory=False))
    samplers = tree.replay.num_samplers
    assert layout(sized(sockets, machine(64, gpu=True)))[0] == 64 - 1 - 8 - 4 * (1 + samplers)


def test_more_shards_than_actors_are_refused_when_the_machine_has_decided_their_number():
    tree = replace(config(envs_per_process=1), replay=replace(Config().replay, num_shards=2))
    with pytest.raises(ConfigError, match=r"actor\.num_actors 1 must be >= replay\.num_shards 2"):
        sized(tree)


def test_says_in_how_many_shards_the_memory_is():
    tree = replace(Config(), replay=replace(Config().replay, num_shards=2))
    (line,) = [line for line in explain(tree, machine(), images()) if line.startswith("replay:")]
    assert line.endswith("= 11% of memory, in 2 shards")


def test_replay_gets_what_its_capacity_takes():
    assert sized().replay.max_bytes == 2_000_000 * 1_400


def test_replay_gets_no_more_than_half_of_the_memory_tables_included():
    result = sized(box=machine(gib=4))
    assert result.replay.max_bytes + table_bytes(result, images()) == 2 * GIB


def test_bytes_that_were_set_stay():
    assert sized(config(replay={"max_bytes": 123_456_789})).replay.max_bytes == 123_456_789
    assert sized(config(replay={"max_bytes": 20 * GIB})).replay.max_bytes == 20 * GIB


def test_refuses_more_replay_than_there_is_memory_and_says_which_setting():
    with pytest.raises(ConfigError) as refusal:
        sized(config(replay={"max_bytes": 24 * GIB}))
    assert str(refusal.value) == (
        "the replay memory needs 24.1 GiB of RAM, but the host has 24.0 GiB: 24.0 GiB of frames "
        "(lower replay.max_bytes) and 138.8 MiB of records and sum-tree (lower replay.capacity 2,000,000)"
    )


def test_takes_exactly_what_there_is():
    room = 24 * GIB - table_bytes(Config(), images())
    assert sized(config(replay={"max_bytes": room})).replay.max_bytes == room
    with pytest.raises(ConfigError, match=r"lower replay\.max_bytes"):
        sized(config(replay={"max_bytes": room + 1}))


def test_refuses_a_replay_that_could_never_begin():
    tree = config(replay={"capacity": 2_000_000, "min_size_to_sample": 1_000_000})
    with pytest.raises(ConfigError) as refusal:
        sized(tree, machine(gib=2))
    assert str(refusal.value) == (
        "the replay memory needs at least 1.4 GiB, 1.3 GiB of it for the frames of replay.min_size_to_sample 1,000,000 "
        "transitions, but half of the RAM is 1.0 GiB: lower replay.capacity 2,000,000 and "
        "replay.min_size_to_sample, or set replay.max_bytes"
    )


def test_refuses_tables_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"needs at least 144.1 GiB.*lower replay\.capacity 2,147,483,648"):
        sized(config(replay={"capacity": 2**31}))


@pytest.mark.parametrize("fields", [{"cores": 0}, {"memory_bytes": 0}])
def test_refuses_what_is_not_a_machine(fields):
    with pytest.raises(ConfigError, match="of a machine must be >= 1"):
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


def test_nothing_else_is_touched():
    tree = Config(seed=5)
    result = sized(tree)
    assert replace(result, actor=tree.actor, learner=tree.learner, replay=tree.replay) == tree
    free = {"num_actors": 0, "num_processes": 0, "envs_per_process": 0}
    assert replace(result.actor, **free) == tree.actor
    assert replace(result.learner, num_threads=0, num_loaders=0) == tree.learner  # The batch is the paper's.
    assert replace(result.replay, max_bytes=0) == tree.replay


def test_explains_a_small_machine():
    assert explain(Config(), machine(), images()) == [
        "machine: 2 cores, 24.0 GiB of memory, no GPU",
        "actors: 1 process x 16 environments = 16 streams for 16 actors",
        "learner: 1 thread; actors use 1 core; replay, 1 loader and evaluator share the rest of 2 cores",
        "  batches of 512; float32",
        "replay: 2.6 GiB of frames + 138.8 MiB of records and sum-tree = 11% of memory",
        "  frames take about 1,400 bytes per transition: 2,000,000 fit; replay.capacity is 2,000,000",
    ]


def test_explains_a_large_machine_where_memory_is_short():
    assert explain(Config(), machine(16, gib=4, gpu=True), images()) == [
        "machine: 16 cores, 4.0 GiB of memory, a GPU",
        "actors: 9 processes x 16 environments = 144 streams for 144 actors",
        "learner: GPU, 1 thread; actors use 9 cores; replay, 5 loaders and evaluator share the rest of 16 cores",
        "  batches of 512; float32",
        "replay: 1.9 GiB of frames + 138.8 MiB of records and sum-tree = 50% of memory",
        "  frames take about 1,400 bytes per transition: 1,429,949 fit; replay.capacity is 2,000,000",
    ]


def idle_cores(tree, box):
    return [line.strip() for line in explain(tree, box, images()) if "cores are idle" in line]


def test_says_why_a_part_of_a_large_machine_has_nothing_to_do_and_what_would_change_that():
    pong = PRESETS["pong"].config
    assert idle_cores(pong, machine(128, gib=512, gpu=True)) == [
        "about 17 of 128 cores are idle: 200 actors in 100 processes, because each needs 1,000 of "
        "replay.capacity 200,000; raise --replay.capacity or --actors to use them"
    ]
    assert idle_cores(config(num_actors=100), machine(192, gib=512, gpu=True)) == [
        "about 81 of 192 cores are idle: 100 actors in 100 processes; raise --actors to use them"
    ]
    assert idle_cores(pong, machine(192, gib=512)) == [
        "about 85 of 192 cores are idle: the learner's batch is too small for more than 64 threads; raise "
        "--learner.batch-size to use them"
    ]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64])
def test_says_nothing_of_idle_cores_where_there_are_none_to_speak_of_or_processes_were_asked_for(cores, gpu):
    assert idle_cores(Config(), machine(cores, gib=512, gpu=gpu)) == []
    assert idle_cores(config(num_processes=1), machine(cores, gib=512, gpu=gpu)) == []


def test_says_when_this_host_leaves_actor_ids_to_others():
    lines = explain(config(num_actors=5, num_processes=2, envs_per_process=2), machine(), images())
    assert lines[1:3] == [
        "actors: 2 processes x 2 environments = 4 streams for 5 actors",
        "  run 1 more actor on other hosts, or raise actor.num_processes or actor.envs_per_process",
    ]


def test_warns_when_the_bytes_that_were_set_may_never_hold_enough_to_begin():
    lines = explain(config(replay={"max_bytes": 1_400 * 49_999}), machine(), images())
    assert lines[-1] == (
        "  warning: training starts at replay.min_size_to_sample 50,000 transitions, which fit only if frames are "
        "smaller than estimated: raise replay.max_bytes"
    )


def test_cuda_without_a_gpu_is_refused_never_a_silent_cpu():
    config = Config(learner=LearnerConfig(device="cuda"))
    with pytest.raises(ConfigError, match="--device cuda, but PyTorch finds no GPU on this host"):
        size_to_machine(config, Machine(cores=2, memory_bytes=2**36, gpu=False), images())
    size_to_machine(config, Machine(cores=2, memory_bytes=2**36, gpu=True), images())


@pytest.mark.parametrize(("gpu", "asked", "loaders"), [(False, 0, 1), (True, 0, 5), (False, 3, 3), (True, 1, 1)])
def test_a_gpu_gets_more_loaders_and_what_was_asked_for_stays(gpu, asked, loaders):
    tree = Config(learner=LearnerConfig(num_loaders=asked))
    assert sized(tree, machine(cores=16, gpu=gpu)).learner.num_loaders == loaders


# A replay server on a host of its own


def test_the_memory_of_replays_own_host_bounds_it_and_not_the_learners():
    small, large = machine(gib=1), 64 * GIB
    apart = sized(config(replay={"host_bytes": large}), small)
    assert apart.replay.max_bytes == sized(box=machine(gib=64)).replay.max_bytes > sized(box=small).replay.max_bytes
    given = {"host_bytes": large, "max_bytes": 40 * GIB}
    assert sized(config(replay=given), small).replay.max_bytes == 40 * GIB
    with pytest.raises(ConfigError, match=r"needs 65.* of RAM, but the host has 64\.0 GiB"):
        sized(config(replay={**given, "max_bytes": 65 * GIB}), machine(gib=512))


def test_a_head_keeps_no_core_for_actors_and_takes_their_number_as_it_was_given():
    tree = config(num_actors=64, batch_size=0, device="cpu")
    head = replace(tree, run=RunConfig(head=True))
    alone, beside = sized(head, machine(16)), sized(tree, machine(16))
    assert layout(alone) == (0, 16, 64, 14)
    assert alone.learner.num_threads > beside.learner.num_threads
    assert sized(alone, machine(16)) == alone
    assert "actors: 64, all on other hosts" in explain(head, machine(16), images())
    assert not any("must come from" in line for line in explain(head, machine(16), images()))
    assert sized(replace(head, actor=ActorConfig(num_actors=2))).actor.envs_per_process == 2
