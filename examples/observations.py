"""Four environments with observations of different kinds; `apex train --env observations:Colour` learns each.

An episode of the first two has 20 decisions, and each right one gives 1.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

RED, GREEN = (200, 0, 0), (0, 102, 0)  # equally bright, so they are one gray


class Colour(gymnasium.Env):
    """An image in colour. Which action is right depends on the colour of a square."""

    size = 128
    observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_decisions = 0
        return self.show(), {}

    def step(self, action):
        reward = float(action == self.right)
        self.num_decisions += 1
        return self.show(), reward, False, self.num_decisions == 20, {}

    def show(self):
        self.right = int(self.np_random.integers(2))
        return self.draw(RED if self.right == 0 else GREEN)

    def draw(self, colour):
        image = np.zeros((self.size, self.size, 3), np.uint8)
        y, x = self.np_random.integers(0, self.size * 3 // 4, 2)
        image[y : y + self.size // 4, x : x + self.size // 4] = colour
        return image


class Camera(Colour):
    """A dictionary of an image and a vector. Which action is right depends on both."""

    size = 64
    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (size, size, 3), np.uint8), "switches": spaces.Box(-1, 1, (4,), np.float32)}
    )

    def show(self):
        is_green, is_on = self.np_random.integers(2, size=2)
        self.right = int(is_green ^ is_on)
        switches = self.np_random.uniform(-0.1, 0.1, 4).astype(np.float32)
        switches[1] = 1 if is_on else -1
        return {"camera": self.draw(GREEN if is_green else RED), "switches": switches}


class Grid(gymnasium.Env):
    """A grid of 7 x 7 cells, each with a kind, a colour and a state. Walk to the goal, within 30 steps."""

    observation_space = spaces.Box(0, 10, (7, 7, 3), np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        self.place, self.goal = (np.array(divmod(cell, 7)) for cell in self.np_random.choice(49, 2, replace=False))
        return self.show(), {}

    def step(self, action):
        self.place = np.clip(self.place + [(0, 1), (1, 0), (0, -1), (-1, 0)][action], 0, 6)
        self.num_steps += 1
        is_there = bool((self.place == self.goal).all())
        return self.show(), float(is_there), is_there, self.num_steps == 30, {"is_success": is_there}

    def show(self):
        cells = np.zeros((7, 7, 3), np.uint8)
        cells[..., 0] = 1
        cells[tuple(self.goal)] = (8, 1, 0)
        cells[tuple(self.place)] = (10, 0, 3)
        return cells


class Planes(gymnasium.Env):
    """Four planes of 10 x 10 bools. Catch five falling balls, one after the other."""

    observation_space = spaces.Box(0, 1, (10, 10, 4), bool)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.paddle, self.num_balls = 5, 0
        self.drop()
        return self.show(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, 9))
        self.height -= 1
        reward = 0.0
        if self.height == 0:
            reward = float(self.ball == self.paddle)
            self.num_balls += 1
            self.drop()
        return self.show(), reward, self.num_balls == 5, False, {}

    def drop(self):
        self.height, self.ball = 9, int(self.np_random.integers(10))

    def show(self):
        planes = np.zeros((10, 10, 4), bool)
        planes[9, self.paddle, 0] = planes[9 - self.height, self.ball, 1] = True
        planes[max(0, 8 - self.height), self.ball, 2] = True
        return planes
