"""Defines every setting once, with its default, unit, range and source. Each class below is one branch of the tree.

[table N], [section N] and [appendix X] mark values from Horgan et al. 2018. [PER] marks values from Schaul et al. 2016,
[DQN] values from Mnih et al. 2015. `presets.py` defines the presets. `apex/command_line.py` turns each field into an
option and the comment beside the field into the help text of that option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from apex.config.addresses import MOST_SAMPLERS, REPLAY_SOCKETS, SOCKETS, TransportConfig
from apex.config.built_in import ALGORITHMS
from apex.config.dpg import DpgConfig
from apex.config.iqn import IqnConfig
from apex.config.r2d2 import R2d2Config
from apex.config.sac import SacConfig
from apex.config.validation import (
    Branch,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seconds,
    Seed,
    check_arguments,
    require_setting,
)
from apexreplay.facts import MAX_TEXT

MAX_IN_FLIGHT = 8_192  # unacknowledged segments of all actors above which windows shrink; each takes 50 KB in Atari
MIRROR_PROTOCOLS = ("s3", "gs", "az")
MAX_EPISODES = 10_000  # maximum episodes of one evaluation, because one message carries all their scores

Decay = Annotated[float, Meta(ge=0, lt=1)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
ImageSize = Annotated[int, Meta(ge=8, le=512)]
Crop = Annotated[str, Meta(pattern=r"^(\d+:\d+,\d+:\d+)?$"), "give TOP:BOTTOM,LEFT:RIGHT in pixels"]
Format = Literal["auto", "on", "off"]
Torso = Literal["dqn", "impala"]
TensorboardPort = Annotated[Port, "use --run.no-tensorboard to start none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig(Branch):
    """The environment, and how its pixels and rewards are prepared for the agent."""

    id: Annotated[str, Meta(min_length=1)] = "ALE/Pong-v5"  # Atari game, Gymnasium id or module:factory; selects preset
    args: dict[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make or the factory; not for Atari
    frame_skip: PositiveInt = 4  # Atari: emulator frames per step; the last two are max-pooled [DQN]
    frame_stack: Annotated[int, Meta(ge=0, le=16)] = 0  # newest frames that the agent sees; 0: Atari 4 [DQN], others 1
    image_size: ImageSize | None = None  # height and width in pixels; none: Atari 84 [DQN], others unchanged
    image_crop: Crop = ""  # rows and columns of images to keep, such as 34:194,0:160; empty: all. Not for Atari
    grayscale: bool = False  # convert images to gray. Atari always [DQN]
    noop_max: NonNegativeInt = 30  # Atari: episodes start with a random number of no-ops below this [DQN]; 0: none
    sticky_actions: Decay = 0.0  # Atari: probability that the emulator repeats the last action. Paper: 0
    full_action_space: bool = False  # Atari: use all 18 actions instead of only those of the game
    max_episode_frames: PositiveInt = 108_000  # Atari: emulator frames after which an episode is truncated [DQN]
    reward_scale: PositiveFloat = 1.0  # factor on the rewards for learning, applied before clipping; scores stay raw
    clip_rewards: bool = True  # clip rewards to [-1, 1] for learning; scores stay raw [DQN]
    life_loss_terminates: bool = True  # Atari: learn as if a lost life ended the episode; game and score continue [DQN]
    fire_after_life_loss: bool = False  # Atari: play FIRE after each lost life. Breakout does not resume without it

    def check_relations(self) -> None:
        check_arguments("environment.args", self.args)

    @property
    def atari_stack(self) -> int:
        """Frames of an Atari game that the agent sees."""
        return self.frame_stack or 4

    @property
    def atari_size(self) -> int:
        """Height and width of Atari's images in pixels."""
        return self.image_size or 84


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(Branch):
    """Exploration. An actor is one environment stream with one epsilon."""

    num_actors: Annotated[int, Meta(ge=0, le=65_536)] = 0  # actors of all hosts; 0: chosen for this machine. Paper: 360
    num_processes: NonNegativeInt = 0  # actor processes on this host; 0: chosen from the number of CPU cores
    envs_per_process: NonNegativeInt = 0  # environments per actor process; 0: the actors are spread evenly
    num_threads: PositiveInt = 1  # PyTorch threads per actor process
    epsilon_base: Annotated[float, Meta(gt=0, lt=1)] = 0.4  # epsilon_i = base^(1 + exponent*i / (N - 1)) [section 4.1]
    epsilon_exponent: NonNegativeFloat = 7.0  # exponent in the formula of epsilon_i, see epsilon_base [section 4.1]
    n_step: Annotated[int, Meta(ge=1, le=64)] = 3  # maximum steps of an n-step return [section 3.2]
    gamma: Fraction = 0.99  # discount factor per step [appendix C]
    segment_length: Annotated[int, Meta(ge=1, le=1000)] = 50  # steps of one actor sent as one segment [section 4.1]
    window: Annotated[int, Meta(ge=1, le=64)] = 8  # segments in flight at which an actor pauses; fewer if N > 1,024
    parameters_period: PositiveInt = 100  # steps between checks for newer parameters. Paper: 400 frames [section 4.1]
    bfloat16: Format = "off"  # compute Q-values for acting in bfloat16; auto: wide networks, if the CPU multiplies it

    @property
    def send_window(self) -> int:
        """The unacknowledged segments at which an actor pauses: many actors have smaller windows."""
        return min(self.window, self.most_window)

    @property
    def most_window(self) -> int:
        """The largest `window` that makes a difference."""
        return min(64, max(2, MAX_IN_FLIGHT // max(1, self.num_actors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(Branch):
    """The replay memory: one replay server, or several that each hold a shard."""

    num_shards: Annotated[int, Meta(ge=1, le=64)] = 1  # number of replay servers, R; each supplies 1/R of a batch
    capacity: Annotated[int, Meta(ge=1, le=2**31)] = 2_000_000  # transitions; new ones replace the oldest [section 4.1]
    max_bytes: NonNegativeInt = 0  # maximum bytes of compressed frames; 0: enough for capacity, up to half the RAM
    host_bytes: NonNegativeInt = 0  # total RAM of separate replay hosts in bytes; 0: replay runs on the learner's host
    min_size_to_sample: PositiveInt = 50_000  # inserted transitions before sampling starts [section 4.1]
    priority_exponent: Annotated[float, Meta(ge=0, le=2)] = 0.6  # alpha; 0: uniform sampling [section 4.1]
    min_priority: Annotated[float, Meta(gt=0, lt=1)] = 1e-6  # above 0, so that any transition can be drawn [PER 3.3]
    num_samplers: Annotated[int, Meta(ge=1, le=MOST_SAMPLERS)] = 1  # processes per server that send batches
    batches_in_flight: Annotated[int, Meta(ge=1, le=1024)] = 8  # maximum batches per sampler that await new priorities
    samples_per_insert: NonNegativeFloat = 0.0  # samples per insert above which samplers wait; 0: no limit, as in paper
    inserts_wait: bool = False  # inserts also wait if sampling falls behind. If on, actors have low CPU priority
    samples_per_insert_tolerance: PositiveFloat = 0.1  # allowed lead or lag of inserts, divided by min_size_to_sample

    def check_relations(self) -> None:
        require_setting(
            self.min_size_to_sample <= self.capacity,
            f"replay.min_size_to_sample {self.min_size_to_sample} must be <= replay.capacity {self.capacity}",
        )
        require_setting(
            not self.inserts_wait or self.samples_per_insert > 0,
            "replay.inserts_wait needs replay.samples_per_insert > 0",
        )

    def per_shard(self) -> ReplayConfig:
        """Returns the settings of one replay server: sizes of the whole memory are divided by R."""
        return replace(
            self,
            num_shards=1,
            capacity=-(-self.capacity // self.num_shards),
            max_bytes=self.max_bytes // self.num_shards,
            min_size_to_sample=-(-self.min_size_to_sample // self.num_shards),
        )

    def server_name(self, shard: int) -> str:
        """Returns the name of a shard's server, as in the names of the logs: "replay", or "replay-1" with shards."""
        return "replay" if self.num_shards == 1 else f"replay-{shard}"

    def server_names(self, shards: Iterable[int]) -> str:
        """Returns the names of the servers of several shards; omits the end of a long list."""
        return ", ".join(map(self.server_name, shards))[:MAX_TEXT]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(Branch):
    """Batches, optimizer, target network and published parameters."""

    batch_size: Annotated[int, Meta(ge=0, le=65_536)] = 512  # transitions per update; 0: automatic [section 4.1]
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # rmsprop: centered, epsilon inside the square root [appendix C]
    learning_rate: PositiveFloat = 6.25e-5  # step size of the optimizer. Paper: 0.00025 / 4 [appendix C]
    learning_rate_warmup: NonNegativeInt = 0  # updates over which the learning rate rises from 0; 0: no warm-up
    learning_rate_updates: NonNegativeInt = 0  # updates over which the learning rate decays linearly; 0: constant
    learning_rate_until_limit: bool = False  # if the run has a limit, the learning rate decays until this limit instead
    final_learning_rate_share: Fraction = 0.1  # learning rate after the decay, divided by learning_rate
    optimizer_epsilon: PositiveFloat = 1.5e-7  # added to the denominator of an optimizer step [appendix C]
    rmsprop_decay: Decay = 0.95  # decay of RMSProp's means of gradients and squared gradients [appendix C]
    adam_beta1: Decay = 0.9  # decay of Adam's mean of gradients (beta 1)
    adam_beta2: Decay = 0.999  # decay of Adam's mean of squared gradients (beta 2)
    init_from: str = ""  # run or policy file whose parameters a new run copies where they fit
    freeze: str = ""  # parts of the network that are not trained, such as body,value.output
    random_shift: Annotated[int, Meta(ge=0, le=64)] = 0  # images: shift states by up to N pixels [Yarats et al. 2021]
    centered_gradients: bool = False  # not DPG, SAC: subtract the mean over each unit's weights [Yong et al. 2020]
    max_gradient_norm: PositiveFloat = 40.0  # gradients with a larger norm are scaled down to it [appendix C]
    loss: Literal["squared", "huber"] = "squared"  # squared: 1/2 delta^2 [section 3.2]. IQN: always quantile Huber
    importance_sampling_exponent: Probability = 0.4  # beta, exponent of the importance weights [section 4.1]
    target: Literal["double_q", "munchausen"] = "double_q"  # rule of the targets [section 3.1; Vieillard et al. 2020]
    target_period: PositiveInt = 2_500  # the target network follows the network every N updates [section 4.1]
    target_share: Fraction = 1.0  # tau, the share of the way that it takes then [Lillicrap et al. 2016]; 1: a copy
    publish_period: PositiveInt = 10  # updates between two publications of the parameters
    publish_seconds: NonNegativeFloat = 0.25  # minimum seconds between two publications; limits network traffic
    publish_bytes_per_second: NonNegativeInt = 0  # bytes/s of parameters to all hosts; 0: a quarter of the link's
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where the learner computes; auto: on a GPU if there is one
    max_skipped_updates: PositiveInt = 10  # end the run after this many non-finite updates in a row
    num_threads: NonNegativeInt = 0  # PyTorch threads; 0: chosen from the number of CPU cores
    num_loaders: Annotated[int, Meta(ge=0, le=64)] = 0  # processes that decode batches; 0: chosen for this machine
    bfloat16: Format = "off"  # compute updates in bfloat16; auto: if the GPU has it, or the CPU and the network is wide


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(Branch):
    """The Q-network: dueling heads on a convolutional or fully connected body. Ape-X DPG and SAC use only `factory`."""

    value_rescaling: bool = False  # the outputs are h(Q) instead of Q, for unclipped rewards [Pohlen et al. 2018]
    factory: str = ""  # your own network, module:factory(schema), in place of the settings below
    width: Annotated[float, Meta(gt=0, le=8)] = 1.0  # factor on channels; images: on hidden units too [DQN]
    torso: Torso = "dqn"  # images; impala: residual blocks, spectral norm, pooling to 6 x 6 [Clark et al. 2024]
    hidden: PositiveInt = 512  # units in the hidden layer of each head [Wang et al. 2016]
    body_hidden: PositiveInt = 128  # vectors: units in each of the two layers below the heads
    dueling: bool = True  # separate heads for state value and advantages [section 3.2]
    initialization: Literal["uniform", "balanced"] = "uniform"  # balanced: more units stay active, see networks.py

    def check_relations(self) -> None:
        require_setting(
            not self.factory or ":" in self.factory,
            f"network.factory must have the form package.module:name, got {self.factory!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorConfig(Branch):
    """Full games that the newest parameters play at intervals during training."""

    enabled: bool = True  # run the evaluator
    period_seconds: NonNegativeFloat = 60.0  # minimum seconds from the start of one evaluation to the start of the next
    period_updates: PositiveInt = 1_000  # updates between two evaluations, if run.single_process is on
    episodes: Annotated[int, Meta(ge=1, le=MAX_EPISODES)] = 5  # full games per evaluation
    confirm_episodes: Annotated[int, Meta(ge=100, le=MAX_EPISODES)] = 100  # new games that confirm a score, at most
    final_seconds: Seconds = 120.0  # maximum seconds for games of the final policy at the end of a run; 0: no games
    epsilon: Probability = 0.001  # probability of random actions; DPG: deviation of noise; SAC: factor on the policy's
    num_envs: PositiveInt = 5  # games played in parallel
    num_threads: PositiveInt = 1  # PyTorch threads


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Branch):
    """Checkpoints of the learner, and snapshots of the replay memory."""

    period: PositiveInt = 5_000  # maximum updates between two checkpoints; see period_seconds for the minimum time
    period_seconds: PositiveFloat = 120.0  # maximum seconds between two checkpoints; the minimum is a quarter of this
    keep: Annotated[int, Meta(ge=2)] = 3  # number of newest checkpoints kept; the best policy is kept as well
    replay: bool = True  # also save the replay memory, for --resume; needs as much disk space as the memory
    replay_period: PositiveFloat = 300.0  # seconds between two snapshots of the replay memory; each writes what is new


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Branch):
    """One training run: its folder, its limits and its processes."""

    name: str = ""  # name of the run folder inside run.folder; empty: environment and time
    folder: str = "runs"  # folder that contains the run folders
    mirror: str = ""  # folder, s3://, gs:// or az:// URL that gets a copy of the run, for --continue elsewhere
    stop_score: float | None = None  # end once new games confirm this mean raw score; none: never
    max_steps: NonNegativeInt = 0  # end after this many steps of all actors together; 0: no limit
    max_updates: NonNegativeInt = 0  # end after this many updates; 0: no limit
    max_minutes: NonNegativeFloat = 0.0  # minutes from the first step on, over all starts; 0: no limit
    head: bool = False  # run no actors here, other hosts run them; needs actor.num_actors > 0
    single_process: bool = False  # all roles in one process; the same seed gives the same curve
    stuck_seconds: Seconds = 300.0  # seconds without progress after which a process is killed; 0: never
    crash_budget: Annotated[float, Meta(ge=0, le=1000)] = 3.0  # allowed crashes per program; 1 expires every 2 minutes
    tensorboard: bool = True  # start TensorBoard, which shows the learning curves
    tensorboard_port: TensorboardPort = 6006  # port of TensorBoard; if it is in use, the next free port
    tensorboard_bind: str = "127.0.0.1"  # address that TensorBoard listens on

    def check_relations(self) -> None:
        require_setting(
            "/" not in self.name and self.name not in (".", ".."),
            f"run.name must be a plain folder name, got {self.name!r}",
        )
        protocol, is_url, place = self.mirror.partition("://")
        known = not is_url or (protocol in MIRROR_PROTOCOLS and bool(place.strip("/")) and not set(place) & set("@?:"))
        require_setting(
            known,
            f"run.mirror must be a folder, or {'://..., '.join(MIRROR_PROTOCOLS)}://...",
            "leave credentials to the environment, as the tools of that store do" if set(place) & set("@?:") else "",
        )
        require_setting(
            not (self.mirror and self.single_process),
            "run.mirror and run.single_process exclude each other, because such a run cannot be continued",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Branch):
    """The complete configuration. The defaults are the paper's values where the paper gives one."""

    seed: Seed = 1  # random seed of the networks, the environments and exploration
    algorithm: str = ""  # dqn, iqn, r2d2, dpg, sac or module:factory(config, schema); empty: by actions
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    iqn: IqnConfig = field(default_factory=IqnConfig)
    dpg: DpgConfig = field(default_factory=DpgConfig)
    sac: SacConfig = field(default_factory=SacConfig)
    r2d2: R2d2Config = field(default_factory=R2d2Config)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check_relations(self) -> None:
        known = self.algorithm in ("", *ALGORITHMS) or ":" in self.algorithm
        names = ", ".join(ALGORITHMS)
        require_setting(known, f"algorithm must be empty, {names} or package.module:factory, got {self.algorithm!r}")
        require_setting(
            self.learner.batch_size <= self.replay.min_size_to_sample,
            f"learner.batch_size {self.learner.batch_size} must be <= "
            f"replay.min_size_to_sample {self.replay.min_size_to_sample}",
        )
        require_setting(
            self.run.stop_score is None or self.evaluator.enabled,
            "run.stop_score needs the evaluator",
            "set evaluator.enabled to true",
        )
        period = self.r2d2.period(self.actor.n_step)
        require_setting(
            period > 0 or self.algorithm != "r2d2",
            f"r2d2.sequence_length {self.r2d2.sequence_length} must be > r2d2.burn_in {self.r2d2.burn_in} + "
            f"actor.n_step {self.actor.n_step}",
        )
        self._check_shards()
        self._check_ports()

    def _check_shards(self) -> None:
        num_shards, capacity = self.replay.num_shards, self.replay.per_shard().capacity
        segment = self.actor.segment_length + self.actor.n_step
        require_setting(
            segment <= capacity,
            f"replay.capacity {self.replay.capacity} / replay.num_shards {num_shards} must be >= "
            f"actor.segment_length + actor.n_step {segment}",
        )
        require_setting(
            self.learner.batch_size % num_shards == 0,
            f"learner.batch_size {self.learner.batch_size} must be a multiple of replay.num_shards {num_shards}",
        )
        require_setting(
            self.actor.num_actors >= num_shards or not self.actor.num_actors,
            f"actor.num_actors {self.actor.num_actors} must be >= replay.num_shards {num_shards}",
        )

    def _check_ports(self) -> None:
        owners: dict[int, str] = {}
        for setting, port in self.ports:
            problem = f"{setting} + port_offset must be <= 65535 for every shard and sampler, got {port}"
            require_setting(port <= 65535, problem)
            require_setting(port not in owners, f"{setting} and {owners.get(port)} are both {port}", "change one")
            owners[port] = setting

    @property
    def steps_per_item(self) -> int:
        """Returns about how many steps an item of the replay memory trains: 1, or those of a sequence."""
        built_in = ALGORITHMS.get(self.algorithm)
        return self.r2d2.period(self.actor.n_step) if built_in is not None and built_in.recurrent else 1

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Returns (setting, port) for every port that the run listens on, except the port of TensorBoard."""
        shards = self.replay.num_shards
        number = {**dict.fromkeys(REPLAY_SOCKETS, shards), "batches": shards * self.replay.num_samplers}
        return [
            (f"transport.{name}_port", self.transport.port(name, index))
            for name in SOCKETS
            for index in range(number.get(name, 1))
        ]
