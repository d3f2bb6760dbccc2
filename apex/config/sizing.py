"""Computes settings that are 0, "chosen for this machine", from cores, memory and GPU. `explain` describes how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from apex.config import ActorConfig, Config, LearnerConfig, NetworkConfig
from apex.errors import ConfigError, require
from apex.types import Schema, record_dtype

# Atari steps/s of one core: 764 with 1 stream, 2,300 with 16, 2,500 with 32. More than 16 mainly delay segments.
ENVS_PER_PROCESS = 16
# CPU time of an actor step divided by that of a learner sample: 1.1 ms / 0.45 ms for Pong on two cores.
SAMPLES_PER_STEP = 2.5
# The replay memory must hold at least about one game of Pong from each actor. In the paper it held 5,500 transitions.
TRANSITIONS_PER_ACTOR = 1_000

# LZ4-compressed bytes per transition at 84 x 84 pixels: 250 to 1,900 in Atari games. Scaled by the number of pixels.
LZ4_BYTES, LZ4_PIXELS = 1_400, 84 * 84
OFFSET_BYTES = 4  # bytes per frame in the offset table of a segment
ALIGNMENT_BYTES = 8  # Each segment begins at a multiple of this.
STEPS_PER_EPISODE = 8  # assumed minimum of the average length; each episode adds one frame, that of its final state
STORED_BYTES = 20  # bytes per transition besides its record: key, position and version
NODE_BYTES = 8  # bytes per node of the sum-tree, which has 2 nodes per leaf; the number of leaves is a power of 2

SAMPLES_PER_THREAD = 8  # minimum samples of a batch per thread; an estimate, not measured
# A batch size chosen here has 32 samples per thread, so that an update takes about as long on any number of cores.
SMALLEST_BATCH, LARGEST_BATCH = 64, 512
BATCH_PER_THREAD = 32
WIDE_DIVISOR = 2  # divides the batch size on CPUs: a wide network takes at least twice the time (docs/learning.md)
WIDE_ENOUGH = 0.5  # minimum width at which bfloat16 is faster on CPUs that support it: Pong, 26 ms instead of 29 ms

# A fast GPU processes 500 to 1,000 batches/s. One loader decodes 130 to 185 batches/s, more than a CPU processes.
MOST_LOADERS = 8
CORES_PER_LOADER = 3
MANY_CORES = 16  # minimum number of cores for which `explain` mentions idle cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of this host, or of the container that this process runs in."""

    cores: int
    memory_bytes: int
    gpu: bool  # whether there is a GPU that PyTorch can use
    cpu_bfloat16: bool = False  # whether the CPU has bfloat16 instructions; emulation is 12 times slower than float32
    gpu_bfloat16: bool = True  # whether the GPU has bfloat16 instructions; true since Ampere

    def __post_init__(self) -> None:
        require(self.cores >= 1, f"cores of a machine must be >= 1, got {self.cores}", ConfigError)
        require(self.memory_bytes >= 1, f"memory_bytes of a machine must be >= 1, got {self.memory_bytes}", ConfigError)


def size_to_machine(config: Config, machine: Machine, schema: Schema) -> Config:
    """Returns `config` with a value for every setting that was 0, "chosen for this machine"; others stay unchanged.

    Raises ConfigError if the replay memory does not fit into RAM or cannot hold a segment, or for `cuda` without a GPU.
    Idempotent.
    """
    require(
        config.learner.device != "cuda" or machine.gpu,
        "--device cuda, but PyTorch finds no GPU on this host: use --device cpu, or run `apex doctor`",
        ConfigError,
    )
    actor = _size_actors(config, machine)
    learner = _size_learner(config, actor, machine, schema)
    replay = replace(config.replay, max_bytes=config.replay.max_bytes or _frame_bytes(config, machine, schema))
    needed, there = replay.max_bytes + table_bytes(config, schema), _replay_memory(config, machine)
    require(
        needed <= there,
        f"the replay memory needs {_size(needed)} of RAM, but the host has {_size(there)}: "
        f"{_size(replay.max_bytes)} of frames (lower replay.max_bytes) and "
        f"{_size(table_bytes(config, schema))} of records and sum-tree (lower replay.capacity {replay.capacity:,})",
        ConfigError,
    )
    room, segment = replay.max_bytes // bytes_per_transition(config, schema), config.actor.segment_length
    require(
        room >= segment * config.replay.num_shards,
        f"replay.max_bytes {replay.max_bytes:,} holds about {room:,} transitions, but each shard must hold a segment "
        f"of {segment} transitions: raise replay.max_bytes, or leave it out",
        ConfigError,
    )
    return replace(config, actor=actor, learner=learner, replay=replay)


def is_wide(network: NetworkConfig, schema: Schema) -> bool:
    """Returns whether a network for images has at least half of the paper's width. A custom network counts as wide."""
    return bool(network.factory) or (len(schema.frame_shape) == 2 and network.width >= WIDE_ENOUGH)


def explain(config: Config, machine: Machine, schema: Schema) -> list[str]:
    """Returns the computation of `size_to_machine` as lines of text."""
    sized = size_to_machine(config, machine, schema)
    actor, learner, replay = sized.actor, sized.learner, sized.replay
    streams = actor.num_processes * actor.envs_per_process
    processes, envs = _count(actor.num_processes, "process", "processes"), _count(actor.envs_per_process, "environment")
    here = f"{processes} x {envs} = {_count(streams, 'stream')} for {_count(actor.num_actors, 'actor')}"
    lines = [
        f"machine: {_count(machine.cores, 'core')}, {_size(machine.memory_bytes)} of memory, "
        f"{'a GPU' if machine.gpu else 'no GPU'}",
        f"actors: {f'{actor.num_actors:,}, all on other hosts' if sized.run.head else here}",
    ]
    if streams < actor.num_actors and not sized.run.head:
        missing = _count(actor.num_actors - streams, "more actor")
        lines.append(f"  run {missing} on other hosts, or raise actor.num_processes or actor.envs_per_process")
    cores = actor.num_processes * actor.num_threads
    busy = _busy_cores(sized, actor, machine) / max(1, cores)
    waiting = f", busy {busy:.0%} of the time" if busy < 1 and not _uses_gpu(learner, machine) else ""
    lines += [
        f"learner: {'GPU, ' if _uses_gpu(learner, machine) else ''}{_count(learner.num_threads, 'thread')}; "
        f"actors use {_count(cores, 'core')}{waiting}; replay, "
        f"{_count(learner.num_loaders, 'loader')} and evaluator share the rest of {_count(machine.cores, 'core')}",
        f"  batches of {learner.batch_size}; {_explain_format(config, machine, schema)}",
    ]
    lines += _explain_idle_cores(config, sized, machine)
    each = bytes_per_transition(sized, schema)
    tables = table_bytes(sized, schema)
    lines.append(
        f"replay: {_size(replay.max_bytes)} of frames + {_size(tables)} of records and sum-tree = "
        f"{(replay.max_bytes + tables) / _replay_memory(config, machine):.0%} of memory"
        f"{f', in {replay.num_shards} shards' * (replay.num_shards > 1)}"
    )
    fit = replay.max_bytes // each
    lines.append(
        f"  frames take about {each:,} bytes per transition: {fit:,} fit; replay.capacity is {replay.capacity:,}"
    )
    if fit < replay.min_size_to_sample:
        lines.append(
            f"  warning: training starts at replay.min_size_to_sample {replay.min_size_to_sample:,} transitions, which "
            "fit only if frames are smaller than estimated: raise replay.max_bytes"
        )
    return lines


def _explain_idle_cores(config: Config, sized: Config, machine: Machine) -> list[str]:
    """Returns a line on the idle cores of a large machine, the reason, and the setting to change; else no line."""
    actor, learner = sized.actor, sized.learner
    helpers = learner.num_loaders + _replay_cores(sized) + 1  # + 1 evaluator
    idle = machine.cores - actor.num_processes * actor.num_threads - learner.num_threads - helpers
    on_gpu = _uses_gpu(learner, machine)
    asked = config.actor.num_processes or (config.run.head if on_gpu else config.learner.num_threads)
    if asked or idle <= machine.cores // 8 or machine.cores < MANY_CORES:
        return []
    if on_gpu:  # Without a GPU the learner uses the cores that the actors do not use.
        why = f"{_count(actor.num_actors, 'actor')} in {actor.num_processes} processes"
        setting = "--actors"
        if not config.actor.num_actors:
            why = f"{why}, because each needs {TRANSITIONS_PER_ACTOR:,} of replay.capacity {sized.replay.capacity:,}"
            setting = "--replay.capacity or --actors"
    else:
        why = f"the learner's batch is too small for more than {_count(learner.num_threads, 'thread')}"
        setting = "--learner.batch-size"
    return [f"  about {idle} of {machine.cores} cores are idle: {why}; raise {setting} to use them"]


def bytes_per_transition(config: Config, schema: Schema) -> int:
    """Returns bytes of frames per transition, rounded up: an estimate for LZ4 images, else exact for a full segment."""
    if schema.codec == "lz4" and len(schema.frame_shape) == 2:
        return _divide_up(LZ4_BYTES * prod(schema.frame_shape), LZ4_PIXELS)
    steps = config.actor.segment_length
    # One frame per step, plus the first stack, the n-step window at the end, and final states of episodes.
    frames = steps + schema.stack + schema.n_step + _divide_up(steps, STEPS_PER_EPISODE)
    return _divide_up(frames * (schema.max_frame_bytes + OFFSET_BYTES) + OFFSET_BYTES + ALIGNMENT_BYTES, steps)


def table_bytes(config: Config, schema: Schema) -> int:
    """Returns the size in bytes of records and sum-tree. It depends on the capacity, not on the content."""
    capacity = config.replay.per_shard().capacity
    leaves = 1 << (capacity - 1).bit_length()
    record = _divide_up(STORED_BYTES + record_dtype(schema).itemsize, 8) * 8
    return config.replay.num_shards * (capacity * record + 2 * leaves * NODE_BYTES)


def _size_actors(config: Config, machine: Machine) -> ActorConfig:
    """Returns the settings of the actors: N = processes x environments per process, or at least N if N is given."""
    actor = config.actor
    processes, envs, num_actors = actor.num_processes, actor.envs_per_process, actor.num_actors
    if config.run.head:  # By default, each actor host starts one process per core.
        return replace(actor, num_processes=0, envs_per_process=envs or min(ENVS_PER_PROCESS, num_actors))
    by_cores = max(1, _actor_cores(config, machine) // actor.num_threads)
    if not (processes or envs or num_actors):
        num_actors = min(by_cores * ENVS_PER_PROCESS, max(1, config.replay.capacity // TRANSITIONS_PER_ACTOR))
    if not envs:
        envs = _divide_up(num_actors, processes or by_cores) if num_actors else ENVS_PER_PROCESS
    if not processes:
        processes = _divide_up(num_actors, envs) if num_actors else by_cores
    return replace(actor, num_processes=processes, envs_per_process=envs, num_actors=num_actors or processes * envs)


def _actor_cores(config: Config, machine: Machine) -> int:
    """Returns cores for actors: with a GPU, all that learner and replay leave; else half, or fewer if inserts wait."""
    half, replay = max(1, machine.cores // 2), config.replay
    if _uses_gpu(config.learner, machine):
        trainer = 1
        return max(half, machine.cores - trainer - _num_loaders(config, machine) - _replay_cores(config))
    if replay.inserts_wait:  # With more cores the actors would only wait.
        return max(1, min(half, int(machine.cores * _share_of_actors(config))))
    return half


def _share_of_actors(config: Config) -> float:
    """Returns the actors' share of the cores if inserts wait: CPU time of a step / that of a step and its samples."""
    return SAMPLES_PER_STEP / (SAMPLES_PER_STEP + config.replay.samples_per_insert)


def _busy_cores(config: Config, actor: ActorConfig, machine: Machine) -> float:
    """Returns the average number of cores that actors keep busy; if inserts wait, actors are idle part of the time."""
    cores = actor.num_processes * actor.num_threads
    return min(cores, machine.cores * _share_of_actors(config)) if config.replay.inserts_wait else cores


def _replay_cores(config: Config) -> int:
    """Returns one core per shard and one per sampler. With shared memory, loaders draw instead of samplers."""
    samplers = 0 if config.transport.shared_memory else config.replay.num_samplers
    return config.replay.num_shards * (1 + samplers)


def _size_learner(config: Config, actor: ActorConfig, machine: Machine, schema: Schema) -> LearnerConfig:
    """Returns the learner's settings: threads, batch size, loaders and number format.

    Without a GPU, the learner has one thread per core that actors leave free, minus an eighth of all cores for replay,
    loaders and evaluator. On fewer than 8 cores, these share the learner's cores, because they are rarely busy.
    """
    learner, on_gpu, wide = config.learner, _uses_gpu(config.learner, machine), is_wide(config.network, schema)
    left = max(1, round(machine.cores - _busy_cores(config, actor, machine) - machine.cores // 8))
    batch_size = learner.batch_size
    if not batch_size:
        threads = min(learner.num_threads or left, machine.cores)  # More threads would not run in parallel.
        on_cores = max(SMALLEST_BATCH, BATCH_PER_THREAD * threads) // (WIDE_DIVISOR if wide else 1)
        most = min(LARGEST_BATCH if on_gpu else on_cores, LARGEST_BATCH, config.replay.min_size_to_sample)
        batch_size = 1 << (most.bit_length() - 1)
    threads = 1 if on_gpu else max(1, min(left, batch_size // SAMPLES_PER_THREAD))  # GPU: 1 to launch kernels
    fast = not schema.action_size and (machine.gpu_bfloat16 if on_gpu else machine.cpu_bfloat16 and wide)
    return replace(
        learner,
        batch_size=batch_size,
        num_threads=learner.num_threads or threads,
        num_loaders=_num_loaders(config, machine),
        bfloat16=("on" if fast else "off") if learner.bfloat16 == "auto" else learner.bfloat16,
    )


def _num_loaders(config: Config, machine: Machine) -> int:
    several = _uses_gpu(config.learner, machine)
    by_machine = max(1, min(MOST_LOADERS, machine.cores // CORES_PER_LOADER)) if several else 1
    return config.learner.num_loaders or by_machine


def _explain_format(config: Config, machine: Machine, schema: Schema) -> str:
    """Returns the number format of updates and the reason for it."""
    learner = config.learner
    on_gpu = _uses_gpu(learner, machine)
    where, has = ("GPU", machine.gpu_bfloat16) if on_gpu else ("CPU", machine.cpu_bfloat16)
    if learner.bfloat16 == "auto":
        if schema.action_size:
            return "float32: policy and critics are too small to gain from bfloat16"
        if has and not on_gpu and not is_wide(config.network, schema):
            return "float32: bfloat16 is slower for a network of this size"
        return f"bfloat16: this {where} supports it" if has else f"float32: this {where} does not support bfloat16"
    if learner.bfloat16 == "on":
        return "bfloat16" if has else f"bfloat16, which is slow on this {where}: set --learner.bfloat16 off"
    return "float32"


def _frame_bytes(config: Config, machine: Machine, schema: Schema) -> int:
    """Returns the bytes for frames, from the capacity. Frames + tables <= half of the RAM, tmpfs's default size."""
    replay, each, tables = config.replay, bytes_per_transition(config, schema), table_bytes(config, schema)
    half = _replay_memory(config, machine) // 2
    needed = replay.min_size_to_sample * each + tables
    require(
        needed <= half,
        f"the replay memory needs at least {_size(needed)}, {_size(replay.min_size_to_sample * each)} of it for the "
        f"frames of replay.min_size_to_sample {replay.min_size_to_sample:,} transitions, but half of the RAM is "
        f"{_size(half)}: lower replay.capacity {replay.capacity:,} and replay.min_size_to_sample, "
        "or set replay.max_bytes",
        ConfigError,
    )
    return min(replay.capacity * each, half - tables)


def _replay_memory(config: Config, machine: Machine) -> int:
    """Returns the RAM in bytes of the hosts that hold the replay memory: this machine, or separate hosts."""
    return config.replay.host_bytes or machine.memory_bytes


def _uses_gpu(learner: LearnerConfig, machine: Machine) -> bool:
    return machine.gpu and learner.device != "cpu"


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
