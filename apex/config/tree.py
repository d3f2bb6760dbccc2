"""Every setting: its default, unit, range and source, once. A role receives its branch.

Numbers marked [table N], [section N] or [appendix X] are those of Horgan et al. 2018; [PER] is Schaul et al. 2016,
[DQN] Mnih et al. 2015. `presets.py` holds the named settings. `command_line.py` makes each field an option, and its
comment the option's help.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from apex.config.addresses import REPLAY_SOCKETS, TransportConfig
from apex.config.validation import (
    Branch,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
)
from apex.errors import require

MAX_EPISODES = 10_000  # of one evaluation: its scores go in one message

Decay = Annotated[float, Meta(ge=0, lt=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Format = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig(Branch):
    """The game, and how its pixels and rewards reach the agent."""

    id: Annotated[str, Meta(min_length=1)] = "ALE/Pong-v5"  # Atari game, Gymnasium id, or package.module:factory
    frame_skip: PositiveInt = 4  # Atari: emulator frames per step; the last two are max-pooled [DQN]
    frame_stack: Annotated[int, Meta(ge=1, le=16)] = 4  # images: frames in one observation [DQN]
    image_size: Annotated[int, Meta(ge=8, le=512)] = 84  # images: height and width in pixels [DQN]
    noop_max: NonNegativeInt = 30  # Atari: an episode begins with fewer no-ops than this, drawn uniformly [DQN]
    sticky_actions: Decay = 0.0  # Atari: probability that the emulator repeats the last action; the paper has none
    full_action_space: bool = False  # Atari: all 18 actions instead of the game's own
    max_episode_frames: PositiveInt = 108_000  # Atari: emulator frames until truncation, 30 minutes [DQN]
    clip_rewards: bool = True  # learn from rewards clipped to [-1, 1]; the score stays raw [DQN]
    life_loss_terminates: bool = True  # learn as if a lost life ended the game; the game and its score go on [DQN]
    fire_after_life_loss: bool = False  # Atari: the step after a lost life is FIRE; Breakout stands still without


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(Branch):
    """Exploration. An actor is one environment stream with one epsilon."""

    num_actors: Annotated[int, Meta(ge=0, le=65_536)] = 0  # N, fixed for a run; 0: by the machine. Paper: 360
    num_processes: NonNegativeInt = 0  # processes on this host; 0: by the machine's cores
    envs_per_process: NonNegativeInt = 0  # environments that one process steps together; 0: spread evenly
    num_threads: PositiveInt = 1  # torch threads of one process
    epsilon_base: Annotated[float, Meta(gt=0, lt=1)] = 0.4  # epsilon_i = base^(1 + exponent i / (N - 1)) [section 4.1]
    epsilon_exponent: NonNegativeFloat = 7.0  # the exponent of epsilon_i [section 4.1]
    n_step: Annotated[int, Meta(ge=1, le=64)] = 3  # steps of an n-step return [section 3.2]
    gamma: Fraction = 0.99  # discount factor per step [appendix C]
    segment_length: Annotated[int, Meta(ge=1, le=1000)] = 50  # steps of an actor between two sends [section 4.1]
    window: Annotated[int, Meta(ge=1, le=64)] = 8  # unacknowledged segments at which an actor pauses
    parameters_period: PositiveInt = 100  # steps between two looks for newer parameters: 400 frames [section 4.1]
    bfloat16: Format = "off"  # compute Q-values for acting in bfloat16; auto: if it is faster on this processor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(Branch):
    """The replay memory: one server, or several that share it."""

    num_shards: Annotated[int, Meta(ge=1, le=64)] = 1  # R: replay servers, each with 1/R of the memory and of a batch
    capacity: Annotated[int, Meta(ge=1, le=2**31)] = 2_000_000  # transitions; the oldest are replaced [section 4.1]
    max_bytes: NonNegativeInt = 0  # bytes of compressed frames; 0: by capacity, and half of the memory at most
    host_bytes: NonNegativeInt = 0  # memory of hosts that only run replay servers; 0: they share the learner's host
    min_size_to_sample: PositiveInt = 50_000  # sampling starts at this many transitions [section 4.1]
    priority_exponent: Annotated[float, Meta(ge=0, le=2)] = 0.6  # alpha; 0: uniform sampling [section 4.1]
    min_priority: Annotated[float, Meta(gt=0, lt=1)] = 1e-6  # least priority: any transition may be drawn [PER 3.3]
    num_samplers: Annotated[int, Meta(ge=1, le=64)] = 1  # processes of one server that draw and send
    batches_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 8  # batches of one sampler that wait for their priorities
    samples_per_insert: NonNegativeFloat = 0.0  # replay ratio above which samplers wait; 0: no limit, as in the paper
    inserts_wait: bool = False  # inserts wait as well if sampling falls behind; actors then run at low priority
    samples_per_insert_tolerance: PositiveFloat = 0.1  # slack of that ratio, as a fraction of min_size_to_sample

    def check_relations(self) -> None:
        require(
            self.min_size_to_sample <= self.capacity,
            f"replay.min_size_to_sample {self.min_size_to_sample} must be <= replay.capacity {self.capacity}",
        )
        require(
            not self.inserts_wait or self.samples_per_insert > 0,
            "replay.inserts_wait needs replay.samples_per_insert > 0",
        )

    def per_shard(self) -> ReplayConfig:
        """The settings of each of the servers: what counts the whole memory, divided by R."""
        return dataclasses.replace(
            self,
            num_shards=1,
            capacity=-(-self.capacity // self.num_shards),
            max_bytes=self.max_bytes // self.num_shards,
            min_size_to_sample=-(-self.min_size_to_sample // self.num_shards),
        )

    def shard_name(self, shard: int) -> str:
        """A server's name for people."""
        return "a replay server" if self.num_shards == 1 else f"shard {shard} of {self.num_shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(Branch):
    """Gradient steps."""

    batch_size: Annotated[int, Meta(ge=0, le=65_536)] = 512  # transitions; 0: by the machine [section 4.1]
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # rmsprop: centered, epsilon inside the root [appendix C]
    learning_rate: PositiveFloat = 6.25e-5  # step size: 0.00025 / 4 [appendix C]
    learning_rate_updates: NonNegativeInt = 0  # updates over which the learning rate decays linearly; 0: constant
    final_learning_rate_share: Fraction = 0.1  # share of the learning rate that is left after that decay
    optimizer_epsilon: PositiveFloat = 1.5e-7  # added to the divisor of a step [appendix C]
    rmsprop_decay: Decay = 0.95  # decay of RMSProp's two means [appendix C]
    adam_beta1: Decay = 0.9  # decay of Adam's mean of gradients
    adam_beta2: Decay = 0.999  # decay of Adam's mean of squared gradients
    max_gradient_norm: PositiveFloat = 40.0  # longer gradients are scaled down to it [appendix C]
    loss: Literal["squared", "huber"] = "squared"  # squared: 1/2 delta^2 [section 3.2]
    importance_sampling_exponent: Probability = 0.4  # beta of the importance weights [section 4.1]
    target_period: PositiveInt = 2_500  # updates between two copies of the online network [section 4.1]
    publish_period: PositiveInt = 10  # updates between two publishes of the parameters
    publish_seconds: NonNegativeFloat = 0.25  # least time between two publishes; it limits the traffic of a fast GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is a GPU
    max_skipped_updates: PositiveInt = 10  # updates in a row with a loss or gradient that is not finite, until failure
    num_threads: NonNegativeInt = 0  # torch threads; 0: by the machine's cores
    num_loaders: Annotated[int, Meta(ge=0, le=64)] = 0  # processes that decode batches; 0: by the machine
    bfloat16: Format = "off"  # autocast to bfloat16; auto: if it is faster on this processor or GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(Branch):
    """The Q-network: dueling heads on a convolutional or a fully connected body."""

    factory: str = ""  # package.module:factory(schema) -> torch.nn.Module, instead of all below
    width: Annotated[float, Meta(gt=0, le=8)] = 1.0  # images: scales channels 32, 64, 64 and the hidden layer [DQN]
    hidden: PositiveInt = 512  # units of each head's hidden layer [Wang et al. 2016]
    body_hidden: PositiveInt = 128  # vectors: units of each of the two layers below the heads
    dueling: bool = True  # separate heads for state value and advantages [section 3.2]

    def check_relations(self) -> None:
        require(
            not self.factory or ":" in self.factory,
            f"network.factory must read package.module:name, got {self.factory!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorConfig(Branch):
    """Full games of the newest parameters, now and then, while training goes on."""

    enabled: bool = True  # run the evaluator
    period_seconds: NonNegativeFloat = 60.0  # between the starts of two evaluations; a longer one delays the next
    period_updates: PositiveInt = 1_000  # updates between two evaluations with run.single_process, instead of seconds
    episodes: Annotated[int, Meta(ge=1, le=MAX_EPISODES)] = 5  # full games per evaluation
    confirm_episodes: Annotated[int, Meta(ge=0, le=MAX_EPISODES)] = 0  # more games that must confirm run.stop_score
    epsilon: Probability = 0.001  # probability of a random action
    num_envs: PositiveInt = 5  # games played side by side
    num_threads: PositiveInt = 1  # torch threads


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Branch):
    """What is kept on disk."""

    period: PositiveInt = 5_000  # updates between two checkpoints of the learner
    keep: Annotated[int, Meta(ge=2)] = 3  # newest checkpoints kept, beside the best; one more than the newest at least
    replay: bool = True  # save the replay memory too, for a resumed run; this takes its size on disk
    replay_period: PositiveFloat = 300.0  # seconds between two snapshots of the replay memory; each adds what is new


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Branch):
    """One training run: where its files are and when it ends."""

    name: str = ""  # folder below `folder`; empty: environment and time
    folder: str = "runs"  # where run folders are
    stop_score: float | None = None  # ends when the evaluator's mean raw score reaches this
    max_steps: NonNegativeInt = 0  # ends after this many steps of all actors; 0: never
    max_updates: NonNegativeInt = 0  # ends after this many updates; 0: never
    max_minutes: NonNegativeFloat = 0.0  # ends after this long, the time before a resume included; 0: never
    single_process: bool = False  # all roles in one process, in an order that no clock decides: one seed, one curve
    stuck_seconds: NonNegativeFloat = 300.0  # a process without progress for so long is killed; 0: never
    tensorboard: bool = True  # show the curves
    tensorboard_port: Port = 6006  # the next free one when taken
    tensorboard_bind: str = "127.0.0.1"  # interface that TensorBoard listens on

    def check_relations(self) -> None:
        require(
            "/" not in self.name and self.name not in (".", ".."),
            f"run.name must be a plain folder name, got {self.name!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Branch):
    """The whole tree. The defaults are the paper's where it gives a value."""

    seed: Seed = 1  # random seed of networks, environments and exploration
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check_relations(self) -> None:
        require(
            self.learner.batch_size <= self.replay.min_size_to_sample,
            f"learner.batch_size {self.learner.batch_size} must be <= "
            f"replay.min_size_to_sample {self.replay.min_size_to_sample}",
        )
        require(
            self.run.stop_score is None or self.evaluator.enabled,
            "run.stop_score needs the evaluator: leave evaluator.enabled on",
        )
        self._check_shards()

    def _check_shards(self) -> None:
        num_shards, capacity = self.replay.num_shards, self.replay.per_shard().capacity
        segment = self.actor.segment_length + self.actor.n_step
        require(
            segment <= capacity,
            f"replay.capacity {self.replay.capacity}{f' / {num_shards} shards' * (num_shards > 1)} must hold a segment "
            f"of up to {segment} transitions",
        )
        require(
            self.learner.batch_size % num_shards == 0,
            f"learner.batch_size {self.learner.batch_size} must be a multiple of replay.num_shards {num_shards}: "
            "a batch has as many transitions from each",
        )
        require(
            self.actor.num_actors >= num_shards or not self.actor.num_actors,
            f"actor.num_actors {self.actor.num_actors} must be >= replay.num_shards {num_shards}: "
            "an actor's experience goes to one shard, and no shard may stay empty",
        )
        last = {**dict.fromkeys(REPLAY_SOCKETS, (num_shards, "shard")), "batches": (self.learner.num_loaders, "loader")}
        for name, (count, owner) in last.items():
            port = self.transport.port(name, max(0, count - 1))
            require(
                port <= 65535,
                f"transport.{name}_port + port_offset must be <= 65535 for every {owner}, got {port} for the last of "
                f"{count}",
            )

    @property
    def part_size(self) -> int:
        """Transitions of a batch that each replay shard gives."""
        return self.learner.batch_size // self.replay.num_shards
