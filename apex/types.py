"""Types that are passed between modules: immutable records, their dtypes and axes.

Axes: E environment streams of one process, A discrete actions, K values of a continuous action, S stacked frames, *F
one frame. An action is int64, 0 ... A - 1, or float32[K] in [-1, 1], depending on the `Schema` (`apexreplay/types.py`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apexreplay.item_kinds import Array


class Role(StrEnum):
    """A role of a program in a run. The value is also the name of the role's command, key file and module, such as
    `apex actor`, `actor.key` and `apex.actor`."""

    LEARNER = "learner"
    REPLAY = "replay"
    ACTOR = "actor"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"  # only requests the status from the learner: `apex status` and the live view


PROGRAMS = (Role.LEARNER, Role.REPLAY, Role.ACTOR, Role.EVALUATOR)  # roles that have their own program


class Exploration(NamedTuple):
    """The amount of exploration of each of N actors."""

    name: str  # meaning of the amounts: "epsilon" or "noise"
    amounts: NDArray[np.float64]  # [N]


class Step(NamedTuple):
    """The result of one step of E environments. An environment whose episode ended has already started the next one."""

    observation: Array  # frame_dtype[E, S, *F]  the state to act in next
    reward: NDArray[np.float32]  # [E]  raw reward, neither clipped nor scaled
    terminated: NDArray[np.bool_]  # [E]  the episode reached a terminal state
    truncated: NDArray[np.bool_]  # [E]  a limit, such as a time limit, ended the episode
    life_lost: NDArray[np.bool_]  # [E]  a life was lost, and the game continues
    final_observation: Array  # frame_dtype[E, S, *F]  last state of episodes that ended; other rows: arbitrary
    failed: NDArray[np.bool_] | None = None  # [E]  the environment failed and was started again; None: no failures
    skipped: NDArray[np.bool_] | None = None  # [E]  the step played nothing and only began an episode; None: nowhere
    played: Array | None = None  # [E] or [E, K]  executed actions; None: the chosen actions were executed
    action_mask: NDArray[np.bool_] | None = None  # [E, A]  actions allowed in `observation`; None: no masks
    final_mask: NDArray[np.bool_] | None = None  # [E, A]  actions allowed in `final_observation`
    # number of an environment whose episode ended -> the metrics that it reported, by name
    metrics: Mapping[int, Mapping[str, float]] = {}

    @property
    def over(self) -> NDArray[np.bool_]:
        """Where the next step belongs to another episode, bool[E]."""
        ended, unplayed = self.terminated | self.truncated, self.unplayed
        return ended if unplayed is None else ended | unplayed

    @property
    def unplayed(self) -> NDArray[np.bool_] | None:
        """Where the step is no transition, bool[E]: `failed` or `skipped`; None: nowhere."""
        if self.failed is None or self.skipped is None:
            return self.skipped if self.failed is None else self.failed
        return self.failed | self.skipped


class Parameters(NamedTuple):
    """A snapshot of the online network."""

    version: int  # num_updates when the snapshot was published
    values: NDArray[np.float32]  # all tensors of the state dict, flattened and concatenated


class Tensor(NamedTuple):
    """One tensor of the network's state dict, whose elements stand one after the other, row by row, in `Parameters`."""

    name: str
    shape: tuple[int, ...]


class RunTime(NamedTuple):
    """The time of a run over all its starts, in seconds."""

    seconds: float = 0.0
    untrained: float = 0.0  # of these: start-ups and final evaluations, which do not count towards `run.max_minutes`


NO_TIME = RunTime()


class Progress(NamedTuple):
    """The progress of a run, except the number of updates. A resumed run continues its curves from these values."""

    num_steps: int = 0  # transitions that the replay servers had stored
    num_episodes: int = 0  # games that actors had finished
    elapsed_seconds: float = 0.0  # over all starts of the run
    untrained_seconds: float = 0.0  # see `RunTime`
