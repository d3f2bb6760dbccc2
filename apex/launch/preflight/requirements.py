"""What a run takes of a host, as arithmetic on a sized configuration: tmpfs, memory, disk, open files.

The constants were measured on a run of Pong and of the paper's network (Linux, torch without CUDA), and rounded up.
They are the memory of a process that no other has, not what `top` shows.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import NamedTuple

from apex.config import Config
from apex.config.sizing import table_bytes
from apex.learning.batch_ring import slots_needed
from apex.replay_memory.store.layout import Sizes
from apex.types import Schema

MIB = 2**20
# Launcher, replay and its snapshot process, coordinator, evaluator, actor host, TensorBoard.
OTHER_PROGRAM_BYTES = 650 * MIB
TRAINER_BYTES = 200 * MIB  # before its first update
CUDA_BYTES = 3 * 2**30  # on the host, and a third of it on the GPU, for CUDA's libraries and context. A guess
ACTOR_PROCESS_BYTES = 132 * MIB  # without its environments
ENVIRONMENT_BYTES = 7 * MIB // 4  # of 84 x 84 pixels, with its window of transitions
LOADER_BYTES = 80 * MIB
UPDATE_COPIES = 7  # of a batch's stacks in float32, at the peak of an update

CHECKPOINT_BYTES = {"uint8": 64 * MIB, "float32": 4 * MIB}  # networks and optimizer; the paper's take 53 MB
SNAPSHOTS = 3  # two are kept while the next is written; in the worst case they have nothing in common

FILES = 64  # that the replay server, the busiest, has open before anybody connects; half of them are ZeroMQ's own
FILES_PER_ACTOR_PROCESS = 2  # its connections there: experience and receipts
FILES_PER_CHILD = 2  # a pipe or a socket pair for each process that a role starts


class Memory(NamedTuple):
    """Bytes of memory, by who takes them."""

    store: int
    actors: int
    learner: int  # with its loaders and their ring
    others: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def store_bytes(config: Config) -> int:
    """Bytes of tmpfs that the replay memory takes, with the counters of those who draw."""
    shard = config.replay.per_shard()
    each = Sizes(shard.capacity, shard.max_bytes, config.actor.num_actors).file_bytes + mmap.PAGESIZE
    return config.replay.num_shards * each


def memory_needed(config: Config, schema: Schema, *, cuda: bool) -> Memory:
    """All memory of a run on one host; what is not the store's is an estimate."""
    actor, learner = config.actor, config.learner
    batch = 2 * learner.batch_size * prod(schema.observation_shape)  # values in the stacks of s_t and of s_{t+m}
    ring = slots_needed(learner.num_loaders, cuda=cuda) * batch * (1 if schema.frame_dtype == "uint8" else 4)
    update = CUDA_BYTES if cuda else update_bytes(config, schema)
    return Memory(
        store=store_bytes(config),
        actors=actor.num_processes * (ACTOR_PROCESS_BYTES + actor.envs_per_process * ENVIRONMENT_BYTES),
        learner=TRAINER_BYTES + update + ring + learner.num_loaders * LOADER_BYTES,
        others=OTHER_PROGRAM_BYTES,
    )


def gpu_bytes(config: Config, schema: Schema) -> int:
    """Memory of the GPU, an estimate."""
    return CUDA_BYTES // 3 + update_bytes(config, schema)


def update_bytes(config: Config, schema: Schema) -> int:
    """What one update has in its hands at once, an estimate."""
    return UPDATE_COPIES * config.learner.batch_size * prod(schema.observation_shape) * 4


def disk_needed(config: Config, schema: Schema) -> int:
    """Bytes of the run folder at most; a network of one's own may take more."""
    checkpoint = config.checkpoint
    snapshots = SNAPSHOTS * (config.replay.max_bytes + table_bytes(config)) if checkpoint.replay else 0
    return (checkpoint.keep + 2) * CHECKPOINT_BYTES[schema.frame_dtype] + snapshots  # and one being written, and best


def files_needed(config: Config) -> tuple[int, str]:
    """Files that one process of the run may have open at once, and how they add up. All actors may be on one host."""
    actor, replay, learner = config.actor, config.replay, config.learner
    processes = max(actor.num_processes, -(-actor.num_actors // actor.envs_per_process))
    children = replay.num_samplers + learner.num_loaders
    needed = FILES + FILES_PER_ACTOR_PROCESS * processes + FILES_PER_CHILD * children
    sum_of = (
        f"{FILES} + {FILES_PER_ACTOR_PROCESS} x {processes} actor processes "
        f"+ {FILES_PER_CHILD} x {children} samplers and loaders"
    )
    return needed, sum_of
