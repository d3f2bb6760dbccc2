"""Computes what a run needs from its sized configuration: tmpfs, memory, disk and open files.

The constants were measured in a run of Pong with the paper's network (Linux, torch without CUDA), and rounded up.
They count only memory that a process does not share with others, so they are less than what `top` shows.
"""

import mmap
from math import prod
from typing import NamedTuple

from apex.config import Config
from apex.learning.batch_ring import slots_needed
from apex.schema import Schema
from apex.sizing import bytes_per_transition, table_bytes
from apexreplay.store.layout import Sizes

MIB = 2**20
# Launcher, replay and its snapshot process, coordinator, evaluator, actor host, TensorBoard.
OTHER_PROGRAM_BYTES = 650 * MIB
TRAINER_BYTES = 200 * MIB  # memory of the trainer before its first update
# Host memory of CUDA's libraries and context; on the GPU they take a third of it. Estimated, not measured.
CUDA_BYTES = 3 * 2**30
ACTOR_PROCESS_BYTES = 132 * MIB  # memory of an actor process without its environments
ENVIRONMENT_BYTES = 7 * MIB // 4  # an environment of 84 x 84 pixels, with its window of transitions
LOADER_BYTES = 80 * MIB
UPDATE_COPIES = 7  # copies of a batch's stacks in float32 at the peak of an update

# Networks and optimizer, by frame dtype; 53 MB for the paper's network.
CHECKPOINT_BYTES = {"uint8": 64 * MIB, "float32": 4 * MIB}
SNAPSHOTS = 3  # two snapshots are kept while the next is written; in the worst case they share no data

FILES = 64  # open files, excluding connections, of the replay server; half of them by ZeroMQ
FILES_PER_ACTOR_PROCESS = 2  # connections of an actor process to the replay server: experience and receipts
FILES_PER_CHILD = 2  # a pipe or a socket pair for each process that a role starts


class Memory(NamedTuple):
    """Bytes of memory that the parts of a run need."""

    store: int
    actors: int
    learner: int  # including its loaders and their batch ring
    queues: int  # segments on their way to the replay servers
    others: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)


def store_bytes(config: Config, schema: Schema) -> int:
    """Returns how many bytes of tmpfs the replay memory needs, including the counters of its samplers."""
    shard = config.replay.per_shard()
    each = Sizes(shard.capacity, shard.max_bytes, config.actor.num_actors).file_bytes(schema.table) + mmap.PAGESIZE
    return config.replay.num_shards * each


def memory_needed(config: Config, schema: Schema, *, cuda: bool) -> Memory:
    """Returns how much memory a run on one host needs. All parts except `store` are estimates."""
    actor, learner = config.actor, config.learner
    item = schema.table.item
    batch = learner.batch_size * len(item.positions) * item.width * prod(schema.frame_shape)  # values of all frames
    ring = slots_needed(learner.num_loaders, cuda=cuda) * batch * (1 if schema.frame_dtype == "uint8" else 4)
    update = CUDA_BYTES if cuda else update_bytes(config, schema)
    return Memory(
        store=store_bytes(config, schema),
        actors=actor.num_processes * (ACTOR_PROCESS_BYTES + actor.envs_per_process * ENVIRONMENT_BYTES),
        learner=TRAINER_BYTES + update + ring + learner.num_loaders * LOADER_BYTES,
        queues=actor.num_actors * actor.send_window * segment_bytes(config, schema),
        others=OTHER_PROGRAM_BYTES,
    )


def segment_bytes(config: Config, schema: Schema) -> int:
    """Returns an estimate of the bytes of a segment."""
    length, period = config.actor.segment_length, max(1, schema.sequence_period)
    return -(-length // period) * (bytes_per_transition(config, schema) + schema.table.record.itemsize)


def gpu_bytes(config: Config, schema: Schema) -> int:
    """Returns an estimate of how many bytes of GPU memory the learner needs."""
    return CUDA_BYTES // 3 + update_bytes(config, schema)


def update_bytes(config: Config, schema: Schema) -> int:
    """Returns an estimate of how many bytes of memory one update needs at its peak."""
    return UPDATE_COPIES * config.learner.batch_size * schema.table.item.width * prod(schema.frame_shape) * 4


def disk_needed(config: Config, schema: Schema) -> int:
    """Returns the maximum size of the run folder in bytes; a custom network may need more."""
    checkpoint = config.checkpoint
    snapshots = SNAPSHOTS * (config.replay.max_bytes + table_bytes(config, schema)) if checkpoint.replay else 0
    return (checkpoint.keep + 2) * CHECKPOINT_BYTES[schema.frame_dtype] + snapshots  # 2: one being written; best policy


def files_needed(config: Config) -> int:
    """Returns the open files of the replay server, which opens the most, if all actors are on one host."""
    actor = config.actor
    processes = max(actor.num_processes, -(-actor.num_actors // actor.envs_per_process))
    children = config.replay.num_samplers + config.learner.num_loaders
    return FILES + FILES_PER_ACTOR_PROCESS * processes + FILES_PER_CHILD * children
