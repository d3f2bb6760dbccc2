"""A vector environment with scripted rewards by environment, game and step."""

import numpy as np

from apex.types import Step


class ScriptedEnvironment:
    """games[i][k] are the rewards of environment i's game k; after its last game, it plays the first one again.

    The observation [E, 1, 1] is the number of the step within its game. With `masked`, the mask allows only this
    action. `reports`: the metrics of each game, by its last reward.
    """

    def __init__(self, games, *, truncates=False, loses_lives=False, masked=False, reports=None):
        self.num_envs = len(games)
        self.actions = []  # record of the calls
        self.rested = []  # (environment, number of its steps)
        self.closed = False
        self._games = games
        self._truncates = truncates
        self._loses_lives = loses_lives
        self._masked = masked
        self._reports = reports or {}

    @property
    def action_mask(self):
        return np.arange(9) == np.array(self._step)[:, None] if self._masked else None

    def reset(self):
        self._game = [0] * self.num_envs
        self._step = [0] * self.num_envs
        return self._observe()

    def step(self, actions):
        self.actions.append(actions.tolist())
        reward, ended = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        for i, games in enumerate(self._games):
            game = games[self._game[i] % len(games)]
            reward[i] = game[self._step[i]]
            self._step[i] += 1
            ended[i] = self._step[i] == len(game)
        final = self._observe()
        for i in np.flatnonzero(ended):
            self._game[i], self._step[i] = self._game[i] + 1, 0
        none = np.zeros_like(ended)
        terminated, truncated = (none, ended) if self._truncates else (ended, none)
        lost = ~ended & self._loses_lives
        step = Step(self._observe(), reward, terminated, truncated, lost, final, action_mask=self.action_mask)
        reports = {int(i): self._reports[reward[i]] for i in np.flatnonzero(ended) if reward[i] in self._reports}
        return step._replace(metrics=reports)

    def rest(self, i):
        self.rested.append((i, len(self.actions)))

    def close(self):
        self.closed = True

    def _observe(self):
        return np.array(self._step, np.float32).reshape(-1, 1, 1)
