"""Two tasks that a policy without memory cannot solve.

cd examples
apex train --preset r2d2 --env memory:make_cue --stop-score 0.9          about half a minute
apex train --preset r2d2 --env memory:make_cartpole --stop-score 450     a few minutes
"""

import gymnasium
import numpy as np
from gymnasium import spaces

DELAY = 11  # steps between the cue and the choice


class Cue(gymnasium.Env):
    """Shows a cue, -1 or 1, in the first observation only. The action at step DELAY must repeat it: reward 1, or -1."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)  # the cue, and 1 before the choice
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        is_over = self.steps > DELAY
        reward = (1.0 if action == self.cue else -1.0) if is_over else 0.0
        return np.array([0, self.steps == DELAY], np.float32), reward, is_over, False, {}


def make_cue():
    """Returns the cue task. Its mean score is 1 with memory, and 0 without."""
    return Cue()


def make_cartpole(render_mode=None):
    """Returns CartPole-v1 without velocities: only the positions of cart and pole."""
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    cartpole = gymnasium.make("CartPole-v1", render_mode=render_mode)
    return gymnasium.wrappers.TransformObservation(cartpole, lambda seen: seen[[0, 2]], space)
