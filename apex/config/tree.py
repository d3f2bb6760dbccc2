"""Every setting: its default, unit, range and source, once. A role receives its branch.

Numbers marked [table N], [section N] or [appendix X] are those of Horgan et al. 2018; [PER] is Schaul et al. 2016,
[DQN] Mnih et al. 2015. `presets.py` holds the named settings; `command_line.py` makes command-line options of the tree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from apex.errors import require

SHARD_STEP = 10  # between a port of one replay shard and the same port of the next
MAX_EPISODES = 10_000  # of one evaluation: its scores go in one message
REPLAY_SOCKETS = ("experience", "priorities", "receipts")  # that each replay shard binds


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """The game, and how its pixels and rewards reach the agent."""

    id: str = "ALE/Pong-v5"  # Atari: names the game only. Or any Gymnasium id, or package.module:factory
    frame_skip: int = 4  # Atari: emulator frames per step, the last two max-pooled [DQN]
    frame_stack: int = 4  # images: frames in one observation [DQN]
    image_size: int = 84  # images: pixels, height = width [DQN]
    noop_max: int = 30  # Atari: fewer than this many no-ops begin an episode, drawn uniformly [DQN]
    sticky_actions: float = 0.0  # Atari: probability that the emulator repeats the last action; the paper has none
    full_action_space: bool = False  # Atari: all 18 actions instead of the game's own
    max_episode_frames: int = 108_000  # Atari: emulator frames, 30 minutes; then truncated [DQN]
    clip_rewards: bool = True  # learn from the sign-preserving clip to [-1, 1]; the score stays raw [DQN]
    life_loss_terminates: bool = True  # learn as if a lost life were terminal; the game and its score go on [DQN]
    fire_after_life_loss: bool = False  # Atari: the step after a lost life is FIRE; without it Breakout stands still

    def __post_init__(self) -> None:
        require(bool(self.id), "environment.id must name an environment, got ''")
        for name in ("frame_skip", "frame_stack", "max_episode_frames"):
            require(getattr(self, name) >= 1, f"environment.{name} must be >= 1, got {getattr(self, name)}")
        require(self.frame_stack <= 16, f"environment.frame_stack must be <= 16, got {self.frame_stack}")
        require(8 <= self.image_size <= 512, f"environment.image_size must be 8 ... 512, got {self.image_size}")
        require(self.noop_max >= 0, f"environment.noop_max must be >= 0, got {self.noop_max}")
        require(
            0 <= self.sticky_actions < 1, f"environment.sticky_actions must be in [0, 1), got {self.sticky_actions}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """Exploration. An actor is one environment stream with one epsilon."""

    num_actors: int = 0  # N, fixed for the run; 0: what the machine bears. The paper used 360 [section 4.1]
    num_processes: int = 0  # processes on this host; 0: by the machine's cores
    envs_per_process: int = 0  # streams that one process steps together; 0: spread evenly
    num_threads: int = 1  # torch threads of one process
    epsilon_base: float = 0.4  # epsilon_i = base^(1 + exponent i / (N - 1)) [section 4.1]
    epsilon_exponent: float = 7.0  # [section 4.1]
    n_step: int = 3  # [section 3.2]
    gamma: float = 0.99  # per-step discount factor [appendix C]
    segment_length: int = 50  # steps of a stream between two sends [section 4.1]
    window: int = 8  # segments of a stream that may be unacknowledged; then exploring pauses
    parameters_period: int = 100  # steps between two looks for newer parameters: 400 frames [section 4.1]
    bfloat16: Literal["auto", "on", "off"] = "off"  # Q-values to act by; auto: where it pays on this host's processor

    def __post_init__(self) -> None:
        require(self.num_actors >= 0, f"actor.num_actors must be >= 1 (or 0: by the machine), got {self.num_actors}")
        require(self.num_actors <= 65_536, f"actor.num_actors must be <= 65536, got {self.num_actors}")
        require(self.num_processes >= 0, f"actor.num_processes must be >= 0, got {self.num_processes}")
        require(self.envs_per_process >= 0, f"actor.envs_per_process must be >= 0, got {self.envs_per_process}")
        require(self.num_threads >= 1, f"actor.num_threads must be >= 1, got {self.num_threads}")
        require(0 < self.epsilon_base < 1, f"actor.epsilon_base must be in (0, 1), got {self.epsilon_base}")
        require(self.epsilon_exponent >= 0, f"actor.epsilon_exponent must be >= 0, got {self.epsilon_exponent}")
        require(1 <= self.n_step <= 64, f"actor.n_step must be 1 ... 64, got {self.n_step}")
        require(0 < self.gamma <= 1, f"actor.gamma must be in (0, 1], got {self.gamma}")
        require(1 <= self.segment_length <= 1000, f"actor.segment_length must be 1 ... 1000, got {self.segment_length}")
        require(1 <= self.window <= 64, f"actor.window must be 1 ... 64, got {self.window}")
        require(self.parameters_period >= 1, f"actor.parameters_period must be >= 1, got {self.parameters_period}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The replay memory: one server, or several that share it."""

    num_shards: int = 1  # R: replay servers, each with 1/R of the memory; a batch has a part from every one
    capacity: int = 2_000_000  # transitions kept; the oldest segments go first [section 4.1]
    max_bytes: int = 0  # bytes of compressed frames kept; 0: by capacity, and half of the memory at most
    host_bytes: int = 0  # memory of the hosts that replay servers have to themselves; 0: they share the learner's
    min_size_to_sample: int = 50_000  # nothing is sampled before this many arrived [section 4.1]
    priority_exponent: float = 0.6  # alpha [section 4.1]; 0 draws uniformly
    min_priority: float = 1e-6  # a live transition is never impossible to draw [PER 3.3]
    num_samplers: int = 1  # processes of one server that draw and send
    batches_in_flight: int = 8  # batches (parts of them) per sampler whose priorities have not come back
    samples_per_insert: float = 0.0  # samplers wait above this replay ratio; 0: free running, as in the paper
    inserts_wait: bool = False  # two-sided: inserts wait too, when sampling falls behind; actors here are nice then
    samples_per_insert_tolerance: float = 0.1  # slack of either side, as a fraction of min_size_to_sample's worth

    def __post_init__(self) -> None:
        require(1 <= self.num_shards <= 64, f"replay.num_shards must be 1 ... 64, got {self.num_shards}")
        require(
            0 < self.min_size_to_sample <= self.capacity,
            f"replay: need 0 < min_size_to_sample <= capacity, got {self.min_size_to_sample} and {self.capacity}",
        )
        require(self.capacity <= 2**31, f"replay.capacity must be <= 2147483648, got {self.capacity}")
        require(self.max_bytes >= 0, f"replay.max_bytes must be >= 0, got {self.max_bytes}")
        require(self.host_bytes >= 0, f"replay.host_bytes must be >= 0, got {self.host_bytes}")
        require(
            0 <= self.priority_exponent <= 2, f"replay.priority_exponent must be 0 ... 2, got {self.priority_exponent}"
        )
        require(0 < self.min_priority < 1, f"replay.min_priority must be in (0, 1), got {self.min_priority}")
        require(1 <= self.num_samplers <= 64, f"replay.num_samplers must be 1 ... 64, got {self.num_samplers}")
        require(
            1 <= self.batches_in_flight <= 1024,
            f"replay.batches_in_flight must be 1 ... 1024, got {self.batches_in_flight}",
        )
        require(self.samples_per_insert >= 0, f"replay.samples_per_insert must be >= 0, got {self.samples_per_insert}")
        require(
            self.samples_per_insert_tolerance > 0,
            f"replay.samples_per_insert_tolerance must be > 0, got {self.samples_per_insert_tolerance}",
        )
        require(
            not self.inserts_wait or self.samples_per_insert > 0,
            "replay.inserts_wait needs replay.samples_per_insert > 0",
        )

    def per_shard(self) -> ReplayConfig:
        """What each of the servers is made for: what counts the whole memory, divided by R."""
        return dataclasses.replace(
            self,
            num_shards=1,
            capacity=-(-self.capacity // self.num_shards),
            max_bytes=self.max_bytes // self.num_shards,
            min_size_to_sample=-(-self.min_size_to_sample // self.num_shards),
        )

    def shard_name(self, shard: int) -> str:
        """How a server is called where a person reads it."""
        return "a replay server" if self.num_shards == 1 else f"shard {shard} of {self.num_shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Gradient steps."""

    batch_size: int = 512  # [section 4.1]; 0: by the machine
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # rmsprop: centered, epsilon inside the root [appendix C]
    learning_rate: float = 6.25e-5  # [appendix C]: 0.00025 / 4
    learning_rate_updates: int = 0  # in which it falls along a line to a share of that, where it stays; 0: it does not
    final_learning_rate_share: float = 0.1  # that share
    optimizer_epsilon: float = 1.5e-7  # [appendix C]
    rmsprop_decay: float = 0.95  # [appendix C]
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_gradient_norm: float = 40.0  # [appendix C]
    loss: Literal["squared", "huber"] = "squared"  # 1/2 delta^2 [section 3.2]
    importance_sampling_exponent: float = 0.4  # beta [section 4.1]
    target_period: int = 2_500  # updates between two copies of the online network [section 4.1]
    publish_period: int = 10  # updates between two publishes of the parameters ...
    publish_seconds: float = 0.25  # ... and at least so long: a GPU's hundreds of updates a second would fill the wire
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    max_skipped_updates: int = 10  # in a row, for a loss or a gradient that is not finite; then the run fails
    num_threads: int = 0  # torch threads; 0: by the machine's cores
    num_loaders: int = 0  # processes that decode batches (and draw them, beside a replay server); 0: by the machine
    bfloat16: Literal["auto", "on", "off"] = "off"  # autocast to it; auto: where it pays on the processor or the GPU

    def __post_init__(self) -> None:
        require(
            0 <= self.batch_size <= 65_536,
            f"learner.batch_size must be 1 ... 65536 (or 0: by the machine), got {self.batch_size}",
        )
        for name in ("learning_rate", "optimizer_epsilon", "max_gradient_norm"):
            require(getattr(self, name) > 0, f"learner.{name} must be > 0, got {getattr(self, name)}")
        require(
            0 < self.final_learning_rate_share <= 1,
            f"learner.final_learning_rate_share must be in (0, 1], got {self.final_learning_rate_share}",
        )
        require(
            self.learning_rate_updates >= 0,
            f"learner.learning_rate_updates must be >= 0, got {self.learning_rate_updates}",
        )
        for name in ("rmsprop_decay", "adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"learner.{name} must be in [0, 1), got {getattr(self, name)}")
        require(
            0 <= self.importance_sampling_exponent <= 1,
            f"learner.importance_sampling_exponent must be 0 ... 1, got {self.importance_sampling_exponent}",
        )
        require(self.publish_seconds >= 0, f"learner.publish_seconds must be >= 0, got {self.publish_seconds}")
        for name in ("target_period", "publish_period", "max_skipped_updates"):
            require(getattr(self, name) >= 1, f"learner.{name} must be >= 1, got {getattr(self, name)}")
        require(self.num_threads >= 0, f"learner.num_threads must be >= 0, got {self.num_threads}")
        require(0 <= self.num_loaders <= 64, f"learner.num_loaders must be 0 ... 64, got {self.num_loaders}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """The Q-network: dueling heads on a convolutional or a fully connected body."""

    factory: str = ""  # package.module:factory(schema) -> torch.nn.Module, instead of all below
    width: float = 1.0  # images: scales the channels 32, 64, 64 and the hidden layer [DQN]
    hidden: int = 512  # units of each head's hidden layer [Wang et al. 2016]
    body_hidden: int = 128  # vectors: units of the two layers below the heads
    dueling: bool = True  # [section 3.2]

    def __post_init__(self) -> None:
        require(0 < self.width <= 8, f"network.width must be in (0, 8], got {self.width}")
        require(self.hidden >= 1, f"network.hidden must be >= 1, got {self.hidden}")
        require(self.body_hidden >= 1, f"network.body_hidden must be >= 1, got {self.body_hidden}")
        require(
            not self.factory or ":" in self.factory,
            f"network.factory must read package.module:name, got {self.factory!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorConfig:
    """Full games of the newest parameters, now and then, while training goes on."""

    enabled: bool = True
    period_seconds: float = 60.0  # between the starts of two evaluations; a longer one delays the next
    period_updates: int = 1_000  # updates between two of them, instead, where run.single_process knows no clock
    episodes: int = 5  # full games per evaluation
    confirm_episodes: int = 0  # this many more must also reach run.stop_score before the run ends; 0: none
    epsilon: float = 0.001  # of the evaluated policy
    num_envs: int = 5  # games played side by side
    num_threads: int = 1  # torch threads

    def __post_init__(self) -> None:
        require(self.period_seconds >= 0, f"evaluator.period_seconds must be >= 0, got {self.period_seconds}")
        for name in ("period_updates", "episodes", "num_envs", "num_threads"):
            require(getattr(self, name) >= 1, f"evaluator.{name} must be >= 1, got {getattr(self, name)}")
        require(self.confirm_episodes >= 0, f"evaluator.confirm_episodes must be >= 0, got {self.confirm_episodes}")
        for name in ("episodes", "confirm_episodes"):
            games = getattr(self, name)
            require(games <= MAX_EPISODES, f"evaluator.{name} must be <= {MAX_EPISODES}, got {games}")
        require(0 <= self.epsilon <= 1, f"evaluator.epsilon must be 0 ... 1, got {self.epsilon}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk."""

    period: int = 5_000  # updates between two checkpoints of the learner
    keep: int = 3  # newest checkpoints kept, beside the best; two at least, as a damaged one falls back to another
    replay: bool = True  # the replay memory too, which a resumed run goes on with; takes its size on disk
    replay_period: float = 300.0  # seconds between two snapshots of the replay memory; each adds what is new

    def __post_init__(self) -> None:
        require(self.period >= 1, f"checkpoint.period must be >= 1, got {self.period}")
        require(self.keep >= 2, f"checkpoint.keep must be >= 2, got {self.keep}")
        require(self.replay_period > 0, f"checkpoint.replay_period must be > 0, got {self.replay_period}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Addresses and ports. The learner's control port is the one that everybody must know."""

    bind: str = "127.0.0.1"  # interface that this host's sockets bind to; beyond loopback it needs keys
    keys: str = ""  # folder of keys, see apex keys --help: every socket uses CURVE, and knows who may connect
    insecure_no_auth: bool = False  # bind beyond loopback without keys: anyone who reaches a port is believed
    port_offset: int = 0  # added to every port below, so that runs stand side by side
    experience_port: int = 51001  # replay, PULL; the next shard's is 10 higher
    priorities_port: int = 51002  # replay, PULL; the same
    receipts_port: int = 51003  # replay, XPUB; the same
    parameters_port: int = 52001  # learner, XPUB
    batches_port: int = 52002  # learner, PULL
    control_port: int = 52003  # learner, ROUTER
    metrics_port: int = 52004  # learner, PULL
    shared_memory: bool = True  # a learner on the replay server's host draws from its memory; False: through sockets
    heartbeat_seconds: float = 1.0  # between two heartbeats on the control socket
    lease_seconds: float = 3.5  # without a heartbeat an actor's ids are free again after this

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            if setting.name.endswith("_port"):
                port = getattr(self, setting.name) + self.port_offset
                require(
                    1024 <= port <= 65535, f"transport.{setting.name} + port_offset must be 1024 ... 65535, got {port}"
                )
        require(self.heartbeat_seconds > 0, f"transport.heartbeat_seconds must be > 0, got {self.heartbeat_seconds}")
        require(
            self.lease_seconds >= 3 * self.heartbeat_seconds,
            f"transport.lease_seconds must be >= 3 heartbeats, got {self.lease_seconds}",
        )
        require(
            bool(self.keys) or self.insecure_no_auth or self.is_loopback,
            f"transport.bind {self.bind!r} is not a loopback address, so it needs keys: apex keys new keys makes them, "
            "--transport.keys keys (of other programs: --keys keys) uses them; "
            "or --insecure-no-auth, where you trust everyone who can reach it",
        )
        require(
            not (self.keys and self.insecure_no_auth),
            f"transport.keys {self.keys!r} and --insecure-no-auth: leave one of them out",
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach what is bound."""
        return self.bind in ("127.0.0.1", "localhost")

    def port(self, name: str, shard: int = 0) -> int:
        """The number of the port `name` ("experience", ...), of a replay shard where it is one of REPLAY_SOCKETS."""
        number: int = getattr(self, name + "_port")
        return number + self.port_offset + SHARD_STEP * shard

    def endpoint(self, name: str, host: str | None = None, shard: int = 0) -> str:
        """The tcp:// address of the socket `name` on `host`, or where to bind it."""
        return f"tcp://{host or self.bind}:{self.port(name, shard)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run: where its files are and when it ends."""

    name: str = ""  # folder below `folder`; empty: environment and time
    folder: str = "runs"  # where run folders are
    stop_score: float | None = None  # ends when the evaluator's mean raw score reaches this
    max_steps: int = 0  # ends after this many steps of all actors; 0: never
    max_updates: int = 0  # ends after this many updates; 0: never
    max_minutes: float = 0.0  # ends after this long, the time before a resume included; 0: never
    single_process: bool = False  # every role in one process, by turns that no clock decides: one seed, one curve
    stuck_seconds: float = 300.0  # who makes no turn for so long is killed; to reserve 200 GB takes 85; 0: never
    tensorboard: bool = True  # show the curves
    tensorboard_port: int = 6006  # the next free one when taken
    tensorboard_bind: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_updates", "max_minutes", "stuck_seconds"):
            require(getattr(self, name) >= 0, f"run.{name} must be >= 0, got {getattr(self, name)}")
        require(
            1024 <= self.tensorboard_port <= 65535,
            f"run.tensorboard_port must be 1024 ... 65535, got {self.tensorboard_port}",
        )
        require(
            "/" not in self.name and self.name not in (".", ".."),
            f"run.name must be a plain folder name, got {self.name!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree. The defaults are the paper's where it gives a value."""

    seed: int = 1  # of networks, environments and exploration
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, f"seed must be 0 ... 2147483647, got {self.seed}")
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
        for name in REPLAY_SOCKETS:
            port = self.transport.port(name, num_shards - 1)
            require(
                port <= 65535,
                f"transport.{name}_port + port_offset must be <= 65535 for every shard, got {port} for the last of "
                f"{num_shards}",
            )

    @property
    def part_size(self) -> int:
        """Transitions of a batch that each replay shard gives."""
        return self.learner.batch_size // self.replay.num_shards
