"""A custom environment: fetch the key, then leave by the door.

    cd examples
    python custom_environment.py                              train until solved, about a minute
    python custom_environment.py --max-updates 200            end after 200 updates at the latest
    apex train --env custom_environment:KeyAndDoor            the same on the command line

Every gymnasium.Env with discrete or continuous actions works. The programs of a run import it by its name. This file
defines the environment and trains, so the training code is below `if __name__ == "__main__"`.
"""

import argparse

import gymnasium
import numpy as np
from gymnasium import spaces

import apex

SIDE, LIMIT = 5, 50
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


class KeyAndDoor(gymnasium.Env):
    """A room of SIDE x SIDE cells. Each episode draws new cells for the agent, the key and the door."""

    observation_space = spaces.Box(0.0, 1.0, (7,), np.float32)  # x, y of agent, key and door; 1 with the key
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random, which must be the only source of randomness
        cells = self.np_random.choice(SIDE * SIDE, 3, replace=False)
        self.agent, self.key, self.door = np.stack([cells % SIDE, cells // SIDE], axis=1)
        self.has_key, self.steps = False, 0
        return self._observe(), {}

    def step(self, action):
        self.agent = np.clip(self.agent + MOVES[action], 0, SIDE - 1)
        self.steps += 1
        reward = -0.01
        if not self.has_key and (self.agent == self.key).all():
            self.has_key, reward = True, 0.5
        leaves = bool(self.has_key and (self.agent == self.door).all())
        # A time limit truncates an episode: later rewards still count in the value of its last state.
        return self._observe(), 1.0 if leaves else reward, leaves, self.steps >= LIMIT, {}

    def _observe(self):
        places = np.concatenate([self.agent, self.key, self.door]) / (SIDE - 1)
        return np.append(places, self.has_key).astype(np.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-updates", type=int, default=0)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    config = apex.preset_for(
        "custom_environment:KeyAndDoor",
        run={"stop_score": 1.4, "tensorboard": False, "max_updates": options.max_updates, "folder": options.folder},
    )
    run = apex.train(config)
    print(f"{run.reason}; mean of 50 new games: {apex.evaluate(run, episodes=50).mean:.2f}")


if __name__ == "__main__":
    main()
