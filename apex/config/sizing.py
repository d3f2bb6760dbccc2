"""Fits a configuration to a machine: this module alone gives a value to each setting that is 0, "by the machine".

The rule is arithmetic on cores, memory and GPU: `explain` prints it, and tests check it for any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from apex.config import ActorConfig, Config, LearnerConfig, NetworkConfig
from apex.errors import require
from apex.types import Schema

# Atari steps/s of one core: 764 with 1 stream, 2,300 with 16, 2,500 with 32. More than 16 only make segments older.
ENVS_PER_PROCESS = 16
# Cost of a step to an actor over cost of a sample to the learner: 1.1 ms over 0.45 ms for Pong on two cores.
SAMPLES_PER_STEP = 2.5
# At least about one game of Pong from each actor must fit in the memory. The paper's 360 actors had 5,500 each.
TRANSITIONS_PER_ACTOR = 1_000

# Bytes of a transition's frames under LZ4, at 84 x 84 pixels: 250 to 1,900 in Atari games. Larger images in proportion.
LZ4_BYTES, LZ4_PIXELS = 1_400, 84 * 84
OFFSET_BYTES = 4  # of a frame, in its segment's table
ALIGNMENT_BYTES = 8  # A segment begins at a multiple of this.
STEPS_PER_EPISODE = 8  # An episode adds one frame, its last state. An average below this would be unusual.
RECORD_BYTES = 40  # of a transition beside its frames
NODE_BYTES = 8  # of the sum-tree, which has two nodes for each of the next power of two of leaves

SAMPLES_PER_THREAD = 8  # of a batch, at least; an estimate, not measured
# A batch by the machine has 32 samples per thread, so that an update takes about as long on any number of cores.
SMALLEST_BATCH, LARGEST_BATCH = 64, 512
BATCH_PER_THREAD = 32
WIDE_DIVISOR = 2  # of the batch, on cores: a sample costs a wide network at least twice as much (docs/learning.md)
WIDE_ENOUGH = 0.5  # width from which bfloat16 is faster on processors that have it: Pong, 26 ms against 29 ms

# A fast GPU takes 500 to 1,000 batches a second, three to five loaders' worth; a CPU takes less than one loader's.
MOST_LOADERS = 5
CORES_PER_LOADER = 5
MANY_CORES = 16  # On fewer, idle cores are not worth a line.


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of this host, or of the container that this process runs in."""

    cores: int
    memory_bytes: int
    gpu: bool  # which torch can use
    cpu_bfloat16: bool = False  # The processor multiplies bfloat16; emulation is 12 times slower than float32.
    gpu_bfloat16: bool = True  # The GPU multiplies bfloat16, as all do since Ampere.

    def __post_init__(self) -> None:
        require(self.cores >= 1, f"a machine has at least 1 core, got {self.cores}")
        require(self.memory_bytes >= 1, f"a machine has memory, got {self.memory_bytes} bytes")


def size_to_machine(config: Config, machine: Machine, schema: Schema) -> Config:
    """Returns `config` with a number for every setting that was 0; other settings stay as they are.

    Raises ConfigError if the replay memory does not fit, or for `cuda` without a GPU. Sizing the result again changes
    nothing.
    """
    require(
        config.learner.device != "cuda" or machine.gpu,
        "--device cuda, but there is no GPU here that torch can use: use --device cpu, or see what apex doctor says",
    )
    actor = _size_actors(config, machine)
    learner = _size_learner(config, actor, machine, schema)
    replay = replace(config.replay, max_bytes=config.replay.max_bytes or _frame_bytes(config, machine, schema))
    needed, there = replay.max_bytes + table_bytes(config), _replay_memory(config, machine)
    require(
        needed <= there,
        f"replay needs {_size(needed)} of memory, but there are {_size(there)}: "
        f"{_size(replay.max_bytes)} of frames (lower replay.max_bytes) and "
        f"{_size(table_bytes(config))} of records and sum-tree (lower replay.capacity {replay.capacity:,})",
    )
    return replace(config, actor=actor, learner=learner, replay=replay)


def is_wide(network: NetworkConfig, schema: Schema) -> bool:
    """Whether a network for images has at least half of the paper's width. A custom network counts as wide."""
    return bool(network.factory) or (len(schema.frame_shape) == 2 and network.width >= WIDE_ENOUGH)


def explain(config: Config, machine: Machine, schema: Schema) -> list[str]:
    """Returns the arithmetic of `size_to_machine` as lines of text."""
    sized = size_to_machine(config, machine, schema)
    actor, learner, replay = sized.actor, sized.learner, sized.replay
    streams = actor.num_processes * actor.envs_per_process
    lines = [
        f"machine: {_count(machine.cores, 'core')}, {_size(machine.memory_bytes)} of memory, "
        f"{'a GPU' if machine.gpu else 'no GPU'}",
        f"actors: {_count(actor.num_processes, 'process', 'processes')} x "
        f"{_count(actor.envs_per_process, 'environment')} = {_count(streams, 'stream')} for "
        f"{_count(actor.num_actors, 'actor')}",
    ]
    if streams < actor.num_actors:
        missing = actor.num_actors - streams
        lines.append(
            f"  {_count(missing, 'actor id')} must come from other hosts, or raise actor.num_processes "
            "or actor.envs_per_process"
        )
    cores = actor.num_processes * actor.num_threads
    busy = _busy_cores(sized, actor, machine) / cores
    waiting = f" that are busy for {busy:.0%} of the time" if busy < 1 and not _uses_gpu(learner, machine) else ""
    lines += [
        f"learner: {'GPU, ' if _uses_gpu(learner, machine) else ''}{_count(learner.num_threads, 'thread')} beside "
        f"{_count(cores, 'core')} of actors{waiting}; "
        f"replay, {_count(learner.num_loaders, 'loader')} and evaluator share what is left of {machine.cores}",
        f"  batches of {learner.batch_size}; {_explain_format(config, machine, schema)}",
    ]
    lines += _explain_idle_cores(config, sized, machine)
    each = bytes_per_transition(sized, schema)
    tables = table_bytes(sized)
    lines.append(
        f"replay: {_size(replay.max_bytes)} of frames + {_size(tables)} of records and sum-tree = "
        f"{(replay.max_bytes + tables) / _replay_memory(config, machine):.0%} of memory"
        f"{f', in {replay.num_shards} shards' * (replay.num_shards > 1)}"
    )
    fit = replay.max_bytes // each
    lines.append(
        f"  frames take about {each:,} bytes a transition: room for {fit:,} of replay.capacity {replay.capacity:,}"
    )
    if fit < replay.min_size_to_sample:
        lines.append(
            f"  fewer than replay.min_size_to_sample {replay.min_size_to_sample:,}: unless frames are smaller than "
            "that, training never begins; raise replay.max_bytes"
        )
    return lines


def _explain_idle_cores(config: Config, sized: Config, machine: Machine) -> list[str]:
    """Names the cores of a large machine that have no work, the reason, and the setting that changes it."""
    actor, learner = sized.actor, sized.learner
    helpers = learner.num_loaders + _replay_cores(sized) + 1  # and an evaluator
    idle = machine.cores - actor.num_processes * actor.num_threads - learner.num_threads - helpers
    on_gpu = _uses_gpu(learner, machine)
    asked = config.actor.num_processes if on_gpu else config.actor.num_processes or config.learner.num_threads
    if asked or idle <= machine.cores // 8 or machine.cores < MANY_CORES:
        return []
    if on_gpu:  # Without a GPU the learner uses the cores that actors leave.
        why = f"{_count(actor.num_actors, 'actor')} in {actor.num_processes} processes"
        setting = "--actors"
        if not config.actor.num_actors:
            why = f"{why}, as a memory of {sized.replay.capacity:,} holds {TRANSITIONS_PER_ACTOR:,} transitions of each"
            setting = "--replay.capacity or --actors"
    else:
        why = f"the learner's batch is too small for more than {_count(learner.num_threads, 'thread')}"
        setting = "--learner.batch-size"
    return [f"  about {idle} of {machine.cores} cores have no work: {why}; a higher {setting} gives them some"]


def bytes_per_transition(config: Config, schema: Schema) -> int:
    """Bytes of frames per transition, rounded up: an estimate for LZ4 images, else the bytes of a full segment."""
    if schema.codec == "lz4" and len(schema.frame_shape) == 2:
        return _divide_up(LZ4_BYTES * prod(schema.frame_shape), LZ4_PIXELS)
    steps = config.actor.segment_length
    # Besides one frame a step: the first stack, the window that is still open at the end, and final states.
    frames = steps + schema.stack + schema.n_step + _divide_up(steps, STEPS_PER_EPISODE)
    return _divide_up(frames * (schema.max_frame_bytes + OFFSET_BYTES) + OFFSET_BYTES + ALIGNMENT_BYTES, steps)


def table_bytes(config: Config) -> int:
    """Bytes of replay memory beside the frames. They grow with the capacity, not with the number of transitions."""
    capacity = config.replay.per_shard().capacity
    leaves = 1 << (capacity - 1).bit_length()
    return config.replay.num_shards * (capacity * RECORD_BYTES + 2 * leaves * NODE_BYTES)


def _size_actors(config: Config, machine: Machine) -> ActorConfig:
    """N = processes x environments. If N is given, every process has an actor, and the streams cover N."""
    actor = config.actor
    processes, envs, num_actors = actor.num_processes, actor.envs_per_process, actor.num_actors
    by_cores = max(1, _actor_cores(config, machine) // actor.num_threads)
    if not (processes or envs or num_actors):
        num_actors = min(by_cores * ENVS_PER_PROCESS, max(1, config.replay.capacity // TRANSITIONS_PER_ACTOR))
    if not envs:
        envs = _divide_up(num_actors, processes or by_cores) if num_actors else ENVS_PER_PROCESS
    if not processes:
        processes = _divide_up(num_actors, envs) if num_actors else by_cores
    return replace(actor, num_processes=processes, envs_per_process=envs, num_actors=num_actors or processes * envs)


def _actor_cores(config: Config, machine: Machine) -> int:
    """Cores for actors: with a GPU all that learner and replay leave, else half, or fewer if inserts wait."""
    half, replay = max(1, machine.cores // 2), config.replay
    if _uses_gpu(config.learner, machine):
        trainer = 1
        return max(half, machine.cores - trainer - _num_loaders(config, machine) - _replay_cores(config))
    if replay.inserts_wait:  # On more cores the actors would only wait.
        return max(1, min(half, int(machine.cores * _share_of_actors(config))))
    return half


def _share_of_actors(config: Config) -> float:
    """The actors' share of all cores if inserts wait: cost of a step over cost of a step and its samples."""
    return SAMPLES_PER_STEP / (SAMPLES_PER_STEP + config.replay.samples_per_insert)


def _busy_cores(config: Config, actor: ActorConfig, machine: Machine) -> float:
    """Cores that the actors keep busy. If inserts wait for samples, actors work for a part of the time only."""
    cores = actor.num_processes * actor.num_threads
    return min(cores, machine.cores * _share_of_actors(config)) if config.replay.inserts_wait else cores


def _replay_cores(config: Config) -> int:
    """One core for each shard's writer, and for each sampler. With shared memory loaders draw, and no sampler runs."""
    samplers = 0 if config.transport.shared_memory else config.replay.num_samplers
    return config.replay.num_shards * (1 + samplers)


def _size_learner(config: Config, actor: ActorConfig, machine: Machine, schema: Schema) -> LearnerConfig:
    """Threads, batch, loaders and number format of the learner.

    Without a GPU its threads are the cores that actors leave, less an eighth for replay, loaders and evaluator. On
    fewer than 8 cores these share the learner's cores, because they are busy for a fraction of the time.
    """
    learner, on_gpu, wide = config.learner, _uses_gpu(config.learner, machine), is_wide(config.network, schema)
    left = max(1, round(machine.cores - _busy_cores(config, actor, machine) - machine.cores // 8))
    batch_size = learner.batch_size
    if not batch_size:
        threads = min(learner.num_threads or left, machine.cores)  # More would not run in parallel.
        on_cores = max(SMALLEST_BATCH, BATCH_PER_THREAD * threads) // (WIDE_DIVISOR if wide else 1)
        most = min(LARGEST_BATCH if on_gpu else on_cores, LARGEST_BATCH, config.replay.min_size_to_sample)
        batch_size = 1 << (most.bit_length() - 1)
    threads = 1 if on_gpu else max(1, min(left, batch_size // SAMPLES_PER_THREAD))  # One launches kernels.
    fast = machine.gpu_bfloat16 if on_gpu else machine.cpu_bfloat16 and wide
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
    """The number format of an update, and the reason."""
    learner = config.learner
    on_gpu = _uses_gpu(learner, machine)
    where, has = ("GPU", machine.gpu_bfloat16) if on_gpu else ("processor", machine.cpu_bfloat16)
    if learner.bfloat16 == "auto":
        if has and not on_gpu and not is_wide(config.network, schema):
            return "float32: so small a network is slower in bfloat16"
        return f"bfloat16, which this {where} has" if has else f"float32: this {where} has no bfloat16"
    if learner.bfloat16 == "on":
        return "bfloat16" if has else f"bfloat16, which this {where} only emulates, slowly: --learner.bfloat16 off"
    return "float32"


def _frame_bytes(config: Config, machine: Machine, schema: Schema) -> int:
    """Bytes for frames: by the capacity, and with tables at most half of the memory, the default size of a tmpfs."""
    replay, each, tables = config.replay, bytes_per_transition(config, schema), table_bytes(config)
    half = _replay_memory(config, machine) // 2
    needed = replay.min_size_to_sample * each + tables
    require(
        needed <= half,
        f"replay needs {_size(needed)} to begin, {_size(replay.min_size_to_sample * each)} of it for the frames of "
        f"replay.min_size_to_sample {replay.min_size_to_sample:,} transitions, but half of the memory is "
        f"{_size(half)}: lower replay.capacity {replay.capacity:,} and replay.min_size_to_sample, "
        "or set replay.max_bytes",
    )
    return min(replay.capacity * each, half - tables)


def _replay_memory(config: Config, machine: Machine) -> int:
    """Bytes of memory of the hosts that keep the replay memory: this machine, or hosts of its own."""
    return config.replay.host_bytes or machine.memory_bytes


def _uses_gpu(learner: LearnerConfig, machine: Machine) -> bool:
    return machine.gpu and learner.device != "cpu"


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
