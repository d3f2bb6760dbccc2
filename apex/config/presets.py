"""Named settings. Each lists only where it leaves the defaults, which are the paper's, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from apex.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    RunConfig,
    from_dict,
)
from apex.errors import require

EnvironmentKind = Literal["atari", "image", "vector"]  # of an environment, by what it shows


class Preset(NamedTuple):
    """A whole tree, and what it is for in one line."""

    config: Config
    summary: str


# Horgan et al. 2018. Every value and its reference stands beside its setting in tree.py. Only the number of actors is
# not a default, because few machines have the cores for it.
PAPER = Config(
    actor=ActorConfig(num_actors=360),  # [section 4.1]
)

# Any Atari game on a machine with a GPU: the paper's network, batch, replay ratio (none) and schedule. What differs
# makes it learn sooner on one machine, and needs half of the memory. How many actors explore follows from the machine;
# the paper had 360.
ATARI = Config(
    environment=EnvironmentConfig(fire_after_life_loss=True),  # paper: not said; Stable-Baselines3's wrapper does it
    actor=ActorConfig(bfloat16="auto"),  # paper: not said; by the processor
    replay=ReplayConfig(
        capacity=1_000_000,  # paper: 2 M; about 1.5 GiB of compressed frames instead of 3
        min_size_to_sample=20_000,  # paper: 50,000, which 360 actors have in seconds
    ),
    learner=LearnerConfig(
        optimizer="adam",  # paper: RMSProp; Adam wants no tuning between games
        learning_rate=1e-4,  # paper: 2.5e-4 / 4, for RMSProp
        optimizer_epsilon=1.5e-4,  # paper: 1.5e-7, for RMSProp; this is Adam's [Hessel et al. 2018]
        loss="huber",  # paper: squared; one huge error moves the network no further than a large one
        bfloat16="auto",  # paper: not said; where the hardware has it, an update takes 0.6 of the time
    ),
    evaluator=EvaluatorConfig(
        # The paper says not when: a full game takes tens of seconds of a core, and is taken from training on few.
        period_seconds=120.0,
        episodes=2,
        confirm_episodes=10,  # where it is to end at a score
        num_envs=2,
    ),
)

# Pong without many cores: as many small updates as these can make. With a network of a quarter of the width and, on few
# cores, a batch of an eighth an update costs about a twentieth. How many actors explore, and how large a batch is,
# follows from the machine: 16 and 64 on two cores.
PONG = Config(
    environment=ATARI.environment,
    actor=ATARI.actor,
    replay=ReplayConfig(
        capacity=200_000,  # paper: 2 M; some games of every actor are enough here
        min_size_to_sample=10_000,  # paper: 50,000; about 5 s of two cores
        # Paper: free running, about 0.8; DQN's own is 8. On few cores samples are scarce, not steps: a crude trial was
        # at 18 after 28 minutes and 0.97 M steps with 6, and with 0.6 still at -21 after 2.4 M.
        samples_per_insert=8.0,
        inserts_wait=True,  # what actors leave of their core: the learner's second thread, loading, evaluator
    ),
    learner=replace(
        ATARI.learner,
        batch_size=0,  # paper: 512; by the machine, which is 64 on few cores
        learning_rate=3e-4,  # paper: 2.5e-4 / 4; the smaller network bears it
        optimizer_epsilon=1e-5,  # paper: 1.5e-7; with 1e-4 and 1.5e-4, which are atari's, Breakout learned half as much
        target_period=500,  # paper: 2,500; updates are as few as the cores are
    ),
    network=NetworkConfig(width=0.25),  # paper: 1
    # There are 30 ways for a game to begin, by its no-ops, and a policy that wins most may lose one of them by 20.
    evaluator=replace(ATARI.evaluator, confirm_episodes=30, num_envs=30),
    checkpoint=CheckpointConfig(period=1_000),
)

# Any other game of pixels without a GPU. Breakout, at a quarter of the width and with a rate that does not fall, stood
# at 16 from its 6th minute to its 22nd (docs/learning.md).
NARROW = replace(
    PONG,
    learner=replace(
        PONG.learner,
        learning_rate_updates=40_000,  # paper: it does not fall; the first 13 minutes of two cores
    ),
    network=NetworkConfig(width=0.5),  # paper: 1
    evaluator=replace(ATARI.evaluator, episodes=10, num_envs=10),  # one game differs from the next by 5
)

# Vectors of a few numbers. Nothing below is the paper's, which plays Atari only: small networks, quick targets, fresh
# parameters, and rewards as they are.
VECTOR = Config(
    environment=EnvironmentConfig(clip_rewards=False),
    actor=ActorConfig(
        num_actors=8,
        segment_length=25,  # half of the paper's: experience is of use sooner
        parameters_period=20,  # the policy changes from second to second
    ),
    replay=ReplayConfig(capacity=50_000, min_size_to_sample=1_000),
    learner=LearnerConfig(
        batch_size=128,
        optimizer="adam",
        learning_rate=1e-3,
        optimizer_epsilon=1e-8,
        loss="huber",
        max_gradient_norm=10.0,
        target_period=100,
        publish_period=5,
        publish_seconds=0.0,  # the network is tiny
        num_threads=1,  # and several threads would wait for each other, however many cores there are
    ),
    network=NetworkConfig(hidden=64, body_hidden=64),
    evaluator=EvaluatorConfig(
        period_seconds=2.0,
        period_updates=500,
        episodes=20,
        confirm_episodes=100,  # the score of a lucky few ends no run
        epsilon=0.0,
        num_envs=20,
    ),
    checkpoint=CheckpointConfig(period=1_000),
)

# What follows was found for this environment, and may be too bold for another.
CARTPOLE = replace(
    VECTOR,
    environment=EnvironmentConfig(id="CartPole-v1", clip_rewards=False),
    actor=replace(VECTOR.actor, num_actors=16, n_step=5),  # n paper: 3; an episode is long beside what one step tells
    # Samples are scarce, not steps: actors that ran freely would take the core that the learner needs.
    replay=replace(VECTOR.replay, samples_per_insert=16.0, inserts_wait=True),
    learner=replace(VECTOR.learner, learning_rate=3e-3, target_period=25),
    evaluator=replace(
        VECTOR.evaluator,
        period_seconds=0.5,  # A policy that solves it is another one two seconds later.
        period_updates=250,
        episodes=10,
        num_envs=100,
    ),
    run=RunConfig(stop_score=475.0),  # the environment's own threshold; an episode gives 500 at most
)

LUNARLANDER = replace(
    VECTOR,
    environment=EnvironmentConfig(id="LunarLander-v3", clip_rewards=False),
    actor=replace(VECTOR.actor, num_actors=16, segment_length=50, n_step=5),
    # With 16 it took half as long again, and with 32 it was at no end after five minutes: it learns from many steps.
    replay=ReplayConfig(capacity=200_000, min_size_to_sample=5_000, samples_per_insert=6.0, inserts_wait=True),
    learner=replace(VECTOR.learner, batch_size=256),
    # Twice as wide, an update takes three times as long on a core, and teaches less than twice as much.
    network=NetworkConfig(hidden=128, body_hidden=128),
    evaluator=replace(VECTOR.evaluator, period_seconds=10.0, num_envs=100),
    run=RunConfig(stop_score=200.0),  # the environment's own threshold
)

DEFAULT = "pong"

PRESETS: dict[str, Preset] = {
    "cartpole": Preset(CARTPOLE, "CartPole-v1, until it is solved: within a minute"),
    "lunarlander": Preset(LUNARLANDER, "LunarLander-v3, until it is solved"),
    "pong": Preset(PONG, "Atari Pong, sized to the machine (the default)"),
    "atari": Preset(ATARI, "any Atari game on a GPU: the paper's network and batch"),
    "paper": Preset(PAPER, "the paper's values, 360 actors"),
}


def preset(name: str, **changes: Any) -> Config:
    """The preset `name`, with changes: `preset("pong", seed=2, run={"max_minutes": 5}, learner={"batch_size": 64})`.

    A branch of the tree is given as a dictionary of its settings; others keep the preset's values. Raises ConfigError
    for an unknown preset or setting and for a value out of range.
    """
    require(name in PRESETS, f"the preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return from_dict(changes, PRESETS[name].config)


def preset_for(kind: EnvironmentKind, environment_id: str, *, gpu: Callable[[], bool]) -> Config:
    """The settings for an environment of which only the id is known; `gpu` says whether the learner has one.

    Pong, CartPole-v1 and LunarLander have presets of their own. Other Atari games and other images go by `atari` on a
    GPU, and without one by `NARROW`: of the paper's updates two cores make one or two a second, of these 55.
    Other vectors go by what `cartpole` and `lunarlander` begin with. Their scores are on scales of their own: no score
    ends these runs.
    """
    name = environment_id.rpartition("/")[2]
    if kind == "vector":  # CartPole-v0 ends an episode after 200 steps, and never gives 475.
        base = LUNARLANDER if name.startswith("LunarLander-") else CARTPOLE if name == "CartPole-v1" else VECTOR
    elif kind == "atari" and name.lower().startswith("pong"):
        base = PONG
    else:
        base = ATARI if gpu() else NARROW
    return replace(base, environment=replace(base.environment, id=environment_id))
