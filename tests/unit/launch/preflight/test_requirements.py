"""What a run needs: memory, disk and open files, computed by hand."""

import dataclasses

import pytest

from apex.config import ActorConfig, CheckpointConfig, Config, LearnerConfig, ReplayConfig
from apex.launch.preflight.requirements import (
    CHECKPOINT_BYTES,
    CUDA_BYTES,
    MIB,
    disk_needed,
    files_needed,
    gpu_bytes,
    memory_needed,
    store_bytes,
)
from apex.learning.batch_ring import MAX_BEHIND
from apex.schema import Schema
from apex.sizing import bytes_per_transition, table_bytes
from apexreplay.store.layout import Sizes

PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
CONFIG = Config(
    actor=ActorConfig(num_actors=40, num_processes=2, envs_per_process=20),
    replay=ReplayConfig(capacity=100_000, max_bytes=10_000_000, num_samplers=3),
    learner=LearnerConfig(batch_size=512, num_loaders=2, num_threads=1),
    checkpoint=CheckpointConfig(keep=3),
)


def test_the_store_needs_its_file_and_a_page_for_readers():
    assert store_bytes(CONFIG, PIXELS) == Sizes(100_000, 10_000_000, 40).file_bytes(PIXELS.table) + 4_096


def test_each_shard_needs_its_part_and_a_page():
    sharded = dataclasses.replace(CONFIG, replay=dataclasses.replace(CONFIG.replay, num_shards=2))
    assert store_bytes(sharded, PIXELS) == 2 * (Sizes(50_000, 5_000_000, 40).file_bytes(PIXELS.table) + 4_096)


def test_memory_is_the_sum_of_store_and_programs():
    needed = memory_needed(CONFIG, PIXELS, cuda=False)
    stacks = 512 * 4 * 84 * 84
    assert needed.store == store_bytes(CONFIG, PIXELS)
    assert needed.actors == 2 * (132 * MIB + 20 * 7 * MIB // 4)
    assert needed.learner == 200 * MIB + 7 * 4 * stacks + 4 * 2 * stacks + 2 * 80 * MIB  # a ring of four slots
    assert needed.total == needed.store + needed.actors + needed.learner + needed.queues + 650 * MIB


@pytest.mark.parametrize(("num_actors", "segments"), [(40, 40 * 8), (4_096, 8_192), (65_536, 131_072)])
def test_segments_on_their_way_need_memory(num_actors, segments):
    """In Atari a transition has about 920 bytes of frames and a record of 34 bytes, and a segment 50 transitions."""
    actor = dataclasses.replace(CONFIG.actor, num_actors=num_actors)
    queues = memory_needed(dataclasses.replace(CONFIG, actor=actor), PIXELS, cuda=False).queues
    assert queues == segments * 50 * (bytes_per_transition(CONFIG, PIXELS) + 34)


def test_each_environment_needs_memory_in_one_process_too():
    actor = ActorConfig(num_actors=360, num_processes=1, envs_per_process=360)
    needed = memory_needed(dataclasses.replace(CONFIG, actor=actor), PIXELS, cuda=False)
    assert needed.actors > 360 * 1.7 * MIB


def test_vectors_are_float32_in_the_ring():
    assert memory_needed(CONFIG, VECTORS, cuda=False).learner == 360 * MIB + (7 + 4 * 2) * 4 * 512 * 4


def test_an_update_on_a_gpu_needs_gpu_memory():
    on_gpu, on_cpu = (memory_needed(CONFIG, PIXELS, cuda=cuda).learner for cuda in (True, False))
    update = 7 * 4 * 512 * 4 * 84 * 84
    behind = MAX_BEHIND * 2 * 512 * 4 * 84 * 84  # uint8, in the ring
    assert on_gpu - on_cpu == CUDA_BYTES - update + behind
    assert gpu_bytes(CONFIG, PIXELS) == CUDA_BYTES // 3 + update


@pytest.mark.parametrize(("schema", "dtype"), [(PIXELS, "uint8"), (VECTORS, "float32")])
def test_the_disk_holds_checkpoints_and_three_snapshots(schema, dtype):
    snapshot = 10_000_000 + table_bytes(CONFIG, schema)
    assert disk_needed(CONFIG, schema) == 5 * CHECKPOINT_BYTES[dtype] + 3 * snapshot
    without = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(keep=2, replay=False))
    assert disk_needed(without, schema) == 4 * CHECKPOINT_BYTES[dtype]


@pytest.mark.parametrize(("changes", "processes"), [({}, 2), ({"num_actors": 41, "envs_per_process": 4}, 11)])
def test_open_files_count_actor_processes_of_all_hosts(changes, processes):
    actor = dataclasses.replace(CONFIG.actor, **changes)
    assert files_needed(dataclasses.replace(CONFIG, actor=actor)) == 64 + 2 * processes + 2 * 5
