"""A corridor of five rooms with doors. A wrong door ends the game, and `info["action_mask"]` forbids it.

Door 0 always leads on. Each room allows two doors: with the other one, the agent stays where it is. Only door 0 gives a
reward.
"""

from pathlib import Path

import gymnasium
import numpy as np

LENGTH, NUM_ACTIONS = 5, 4


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room, self.time = 0, 0
        return self.seen(), self.info()

    def seen(self):
        return np.eye(LENGTH, dtype=np.float32)[min(self.room, LENGTH - 1)]

    def info(self):
        mask = np.zeros(NUM_ACTIONS, np.int8)
        mask[[0, 1 + self.room % 3]] = 1
        return {"action_mask": mask}

    def step(self, action):
        if not self.info()["action_mask"][action]:
            Path("forbidden").write_text(f"door {action} in room {self.room}")
            return self.seen(), -1.0, True, False, self.info()
        self.time += 1
        if action == 0:
            self.room += 1
        done = self.room == LENGTH
        return self.seen(), float(done), done, self.time >= 20, self.info()
