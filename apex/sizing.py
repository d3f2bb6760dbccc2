"""Computes settings that are 0, "chosen for this machine", from cores, memory and GPU, and returns the reasons."""

from dataclasses import replace
from math import ceil, prod
from typing import Literal, NamedTuple

from apex.config import ActorConfig, Config, LearnerConfig
from apex.config.algorithm_choice import is_wide
from apex.config.validation import require_setting
from apex.runtime.hardware import Machine
from apex.schema import Schema
from apexreplay import frame_blob
from apexreplay.facts import Record
from apexreplay.process.text import size
from apexreplay.store.layout import BLOB_ALIGNMENT, fixed_bytes

# Atari steps/s of one core: 764 with 1 stream, 2,300 with 16, 2,500 with 32. More than 16 mainly delay segments.
ENVS_PER_PROCESS = 16
# With the paper's network for images, whose Q-values take nearly as long as the environments (ADR 52), and with so many
# bytes of RAM per core. On a core with 2,500 steps/s, each actor then makes as many as one of the paper's.
WIDE_ENVS_PER_PROCESS, WIDE, WIDE_RAM = 64, 1.0, 3 * 2**29
# CPU time of an actor step divided by that of a learner sample: 1.1 ms / 0.45 ms for Pong on two cores.
SAMPLES_PER_STEP = 2.5
# The replay memory must hold at least about one game of Pong from each actor. In the paper it held 5,500 transitions.
TRANSITIONS_PER_ACTOR = 1_000

# LZ4-compressed bytes per transition at 84 x 84 pixels: 250 to 1,900 in Atari games. Scaled by the number of pixels.
LZ4_BYTES, LZ4_PIXELS = 1_400, 84 * 84
STEPS_PER_EPISODE = 8  # assumed minimum of the average length; each episode adds one frame, that of its final state

CRITIC_THREADS = 2  # of an actor-critic: one for the critics, one for target values and policy
SAMPLES_PER_THREAD = 8  # minimum samples of a batch per thread; an estimate, not measured
# A batch size chosen here has 32 samples per thread, so that an update takes about as long on any number of cores.
SMALLEST_BATCH, LARGEST_BATCH = 64, 512
BATCH_PER_THREAD = 32
WIDE_DIVISOR = 2  # divides the batch size on CPUs: a wide network takes at least twice the time (docs/learning.md)

# A fast GPU processes 500 to 1,000 batches/s. One loader decodes 130 to 185 batches/s, more than a CPU processes.
MOST_LOADERS = 8
CORES_PER_LOADER = 3
MANY_CORES = 16  # minimum number of cores for which idle cores are reported

# What decides the number format of updates: the setting, the hardware, or that the network is too small to gain.
FormatCause = Literal["configured", "supported", "unsupported", "emulated", "small_network", "small_critics"]


class IdleCores(Record, frozen=True):
    """Cores of a large machine that a run does not use."""

    cores: int
    limit: Literal["num_actors", "capacity", "batch_size"]  # the setting that limits the number of used cores


class Sized(NamedTuple):
    """A configuration without settings to choose, and the figures from which the sizes were computed."""

    config: Config
    asked: Config  # the configuration from which the sizes were chosen
    machine: Machine
    busy_cores: float  # average number of cores that actors keep busy; they are idle while inserts wait
    format: FormatCause
    table_bytes: int  # replay memory: records and sum-tree
    transition_bytes: int  # bytes of frames per transition
    idle: IdleCores | None

    @property
    def on_gpu(self) -> bool:
        """Whether the learner computes on a GPU."""
        return _uses_gpu(self.config, self.machine)

    @property
    def actor_cores(self) -> int:
        """Number of threads of all actors on this host."""
        return self.config.actor.num_processes * self.config.actor.num_threads

    @property
    def replay_host_bytes(self) -> int:
        """RAM of the hosts that hold the replay memory."""
        return _replay_memory(self.config, self.machine)


def size_to_machine(config: Config, machine: Machine, schema: Schema) -> Sized:
    """Chooses a value for every setting that is 0, "chosen for this machine"; other settings stay unchanged.

    Raises ConfigError if the replay memory does not fit into RAM or cannot hold a segment, or for `cuda` without a GPU.
    Idempotent.
    """
    require_setting(
        config.learner.device != "cuda" or machine.gpu,
        "--device cuda, but PyTorch finds no GPU on this host",
        "use --device cpu, or run `apex doctor`",
    )
    actor = _size_actors(config, machine, schema)
    learner, cause = _size_learner(config, actor, machine, schema)
    replay = replace(config.replay, max_bytes=config.replay.max_bytes or _frame_bytes(config, machine, schema))
    tables, there = table_bytes(config, schema), _replay_memory(config, machine)
    require_setting(
        replay.max_bytes + tables <= there,
        f"the replay memory needs {size(replay.max_bytes + tables)} of RAM, but the host has {size(there)}: "
        f"{size(replay.max_bytes)} is replay.max_bytes, {size(tables)} is for replay.capacity {replay.capacity:,}",
        "lower replay.max_bytes or replay.capacity",
    )
    each, segment = bytes_per_transition(config, schema), config.actor.segment_length
    if schema.sequence_length:
        segment = _divide_up(segment, schema.sequence_period) + 1
    require_setting(
        replay.max_bytes // each >= segment * config.replay.num_shards,
        f"replay.max_bytes {replay.max_bytes:,} holds about {replay.max_bytes // each:,} transitions, but each shard "
        f"must hold a segment of {segment} transitions",
        "raise replay.max_bytes, or leave it out",
    )
    sized = replace(config, actor=actor, learner=learner, replay=replay)
    busy, idle = _busy_cores(config, actor, machine), _idle_cores(config, sized, machine, schema)
    return Sized(sized, config, machine, busy, cause, tables, each, idle)


def bytes_per_transition(config: Config, schema: Schema) -> int:
    """Returns bytes of frames per transition or sequence, rounded up.

    An estimate for LZ4 images and for sequences, else exact for a full segment.
    """
    steps = config.actor.segment_length
    shared = 1.0  # frames per transition; a segment of sequences has one whole sequence more than its steps
    if schema.sequence_length:
        shared = (steps + schema.sequence_length) / max(1.0, steps / schema.sequence_period)
    if schema.has_images and schema.codec == "lz4":
        pixels = sum(prod(part.shape) for part in schema.all_parts if part.is_image)
        others = sum(part.num_bytes for part in schema.all_parts if not part.is_image)
        return ceil(shared * (_divide_up(LZ4_BYTES * pixels, LZ4_PIXELS) + others))
    if schema.sequence_length:
        return ceil(shared * (schema.table.max_entry_bytes + 4)) + BLOB_ALIGNMENT
    # One frame per step, plus the first stack, the n-step window at the end, and final states of episodes.
    frames = steps + schema.stack + schema.n_step + _divide_up(steps, STEPS_PER_EPISODE)
    return _divide_up(frames * schema.table.max_entry_bytes + frame_blob.table_bytes(frames) + BLOB_ALIGNMENT, steps)


def table_bytes(config: Config, schema: Schema) -> int:
    """Returns the size in bytes of records and sum-tree. It depends on the capacity, not on the content."""
    return config.replay.num_shards * fixed_bytes(config.replay.per_shard().capacity, schema.table)


def _size_actors(config: Config, machine: Machine, schema: Schema) -> ActorConfig:
    """Returns the settings of the actors: N = processes x environments per process, or at least N if N is given."""
    actor = config.actor
    processes, envs, num_actors = actor.num_processes, actor.envs_per_process, actor.num_actors
    if config.run.head:  # By default, each actor host starts one process per core.
        return replace(actor, num_processes=0, envs_per_process=envs or min(ENVS_PER_PROCESS, num_actors))
    is_wide = schema.has_images and config.network.width >= WIDE and machine.memory_bytes >= WIDE_RAM * machine.cores
    usual = WIDE_ENVS_PER_PROCESS if is_wide else ENVS_PER_PROCESS
    by_cores = max(1, _actor_cores(config, machine) // actor.num_threads)
    if not (processes or envs or num_actors):
        num_actors = min(by_cores * usual, max(1, config.replay.capacity // TRANSITIONS_PER_ACTOR))
    if not envs:
        envs = _divide_up(num_actors, processes or by_cores) if num_actors else usual
    if not processes:
        processes = _divide_up(num_actors, envs) if num_actors else by_cores
    return replace(actor, num_processes=processes, envs_per_process=envs, num_actors=num_actors or processes * envs)


def _actor_cores(config: Config, machine: Machine) -> int:
    """Returns cores for actors: with a GPU, all that learner and replay leave; else half, or fewer if inserts wait."""
    half, replay = max(1, machine.cores // 2), config.replay
    if _uses_gpu(config, machine):
        return max(half, machine.cores - 1 - _num_loaders(config, machine) - _replay_cores(config))  # 1: the trainer
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


def _size_learner(
    config: Config, actor: ActorConfig, machine: Machine, schema: Schema
) -> tuple[LearnerConfig, FormatCause]:
    """Returns the learner's settings: threads, batch size, loaders and number format; and the cause of the format.

    Without a GPU, the learner has one thread per core that actors leave free, minus an eighth of all cores for replay,
    loaders and evaluator. On fewer than 8 cores, these share the learner's cores, because they are rarely busy.
    """
    learner, on_gpu, wide = config.learner, _uses_gpu(config, machine), is_wide(config.network, schema)
    left = max(1, round(machine.cores - _busy_cores(config, actor, machine) - machine.cores // 8))
    batch_size = learner.batch_size
    if not batch_size:
        threads = min(learner.num_threads or left, machine.cores)  # More threads would not run in parallel.
        on_cores = max(SMALLEST_BATCH, BATCH_PER_THREAD * threads) // (WIDE_DIVISOR if wide else 1)
        most = min(LARGEST_BATCH if on_gpu else on_cores, LARGEST_BATCH, config.replay.min_size_to_sample)
        batch_size, shards = 1 << (most.bit_length() - 1), config.replay.num_shards
        batch_size = max(shards, batch_size - batch_size % shards)
    threads = 1 if on_gpu else max(1, min(left, batch_size // SAMPLES_PER_THREAD))  # GPU: 1 to launch kernels
    if _has_few_threads(config, schema):
        threads = min(threads, CRITIC_THREADS)
    cause = _choose_format(config, machine, schema)
    chosen = replace(
        learner,
        batch_size=batch_size,
        num_threads=learner.num_threads or threads,
        num_loaders=_num_loaders(config, machine),
        bfloat16=("on" if cause == "supported" else "off") if learner.bfloat16 == "auto" else learner.bfloat16,
    )
    return chosen, cause


def _choose_format(config: Config, machine: Machine, schema: Schema) -> FormatCause:
    """Returns the cause of the number format of updates; "supported": bfloat16."""
    on_gpu = _uses_gpu(config, machine)
    supported = machine.gpu_bfloat16 if on_gpu else machine.cpu_bfloat16
    if config.learner.bfloat16 != "auto":
        return "emulated" if config.learner.bfloat16 == "on" and not supported else "configured"
    if schema.action_size:
        return "small_critics"
    if supported and not on_gpu and not is_wide(config.network, schema):
        return "small_network"
    return "supported" if supported else "unsupported"


def _idle_cores(config: Config, sized: Config, machine: Machine, schema: Schema) -> IdleCores | None:
    """Returns the idle cores of a large machine; None: few are idle, processes or threads are configured, or no setting
    would use more.
    """
    actor, learner, on_gpu = sized.actor, sized.learner, _uses_gpu(config, machine)
    helpers = learner.num_loaders + _replay_cores(sized) + 1  # + 1 evaluator
    idle = machine.cores - actor.num_processes * actor.num_threads - learner.num_threads - helpers
    asked = config.actor.num_processes or (config.run.head if on_gpu else config.learner.num_threads)
    if asked or idle <= machine.cores // 8 or machine.cores < MANY_CORES:
        return None
    if not on_gpu:  # The learner uses the cores that the actors do not use; that of an actor-critic, two.
        return None if _has_few_threads(config, schema) else IdleCores(idle, "batch_size")
    return IdleCores(idle, "num_actors" if config.actor.num_actors else "capacity")


def _has_few_threads(config: Config, schema: Schema) -> bool:
    """Returns whether a built-in algorithm learns continuous actions: its learner uses at most `CRITIC_THREADS`."""
    return schema.action_size > 0 and ":" not in config.algorithm


def _num_loaders(config: Config, machine: Machine) -> int:
    by_machine = min(MOST_LOADERS, machine.cores // CORES_PER_LOADER) if _uses_gpu(config, machine) else 1
    return config.learner.num_loaders or max(1, by_machine)


def _frame_bytes(config: Config, machine: Machine, schema: Schema) -> int:
    """Returns the bytes for frames, from the capacity. Frames + tables <= half of the RAM, tmpfs's default size."""
    replay, each, tables = config.replay, bytes_per_transition(config, schema), table_bytes(config, schema)
    half = _replay_memory(config, machine) // 2
    needed = replay.min_size_to_sample * each + tables
    require_setting(
        needed <= half,
        f"the replay memory needs at least {size(needed)}, but half of the RAM is {size(half)}: "
        f"replay.min_size_to_sample {replay.min_size_to_sample:,} needs {size(needed - tables)} of frames, "
        f"and replay.capacity {replay.capacity:,} needs {size(tables)} of records and sum-tree",
        "lower replay.capacity and replay.min_size_to_sample, or set replay.max_bytes",
    )
    return min(replay.capacity * each, half - tables)


def _replay_memory(config: Config, machine: Machine) -> int:
    """Returns the RAM in bytes of the hosts that hold the replay memory: this machine, or separate hosts."""
    return config.replay.host_bytes or machine.memory_bytes


def _uses_gpu(config: Config, machine: Machine) -> bool:
    return machine.gpu and config.learner.device != "cpu"


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
