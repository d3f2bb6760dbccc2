"""Stable-Baselines3 with a replay server: DQN(..., replay_buffer_class=ServerReplayBuffer). See docs/guide/adapters.md."""

import numpy as np
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, ReplayBufferSamples

from apexreplay import Client, TableSettings, Window, serve, table

TABLE = "transitions"
AHEAD, AHEAD_BYTES = 16, 1 << 20


class ServerReplayBuffer(ReplayBuffer):
    """Stores each observation once; of `frame_stack` frames (VecFrameStack, channels first), each frame once.

    Starts a server; with the `address` of another buffer, shares its server. `limits`: of TableSettings.
    """

    def __init__(self, size, *spaces, device="auto", n_envs=1, frame_stack=1, address=None, snapshots=None, **limits):
        BaseBuffer.__init__(self, size, *spaces, device=device, n_envs=n_envs)
        self.handle_timeout_termination = limits.pop("handle_timeout_termination", True)
        if limits.pop("optimize_memory_usage", False) or not isinstance(self.obs_shape, tuple):
            raise ValueError("leave out optimize_memory_usage, and use observations that are arrays")
        self.frames = (frame_stack, self.obs_shape[0] // frame_stack, *self.obs_shape[1:])
        action = (self._maybe_cast_dtype(self.action_space.dtype), (self.action_dim,))
        values = {"action": action, "reward": ("float32", (1,)), "done": ("float32", (1,))}
        fields = {"observation": (self.observation_space.dtype, self.frames[1:])}
        steps = table(TABLE, fields, item=Window(stack=frame_stack, span=1), values=values)
        settings = TableSettings(table=steps, **{"capacity": size, "priority_exponent": 0, **limits})
        self.server = None if address else serve([settings], snapshots=snapshots)
        self.address = address or (self.server.host, self.server.port)
        self.client = Client(*self.address)
        self.writers = [self.client.writer(TABLE) for _ in range(n_envs)]
        self.newest, self.sampler, self.batches = [None] * n_envs, None, []

    def add(self, obs, next_obs, action, reward, done, infos):
        obs, next_obs = (np.array(each).reshape(-1, *self.frames) for each in (obs, next_obs))
        for i, (writer, action) in enumerate(zip(self.writers, action.reshape(-1, self.action_dim), strict=True)):
            if not np.array_equal(obs[i], self.newest[i]):  # The first of an episode: zeros before it are not stored.
                writer.end_episode()
                first = next((k for k, frame in enumerate(obs[i]) if frame.any()), -1)
                for frame in obs[i][first:]:
                    writer.append({"observation": frame})
            if not np.array_equal(obs[i][1:], next_obs[i][:-1]):
                raise ValueError(f"frame_stack={len(obs[i])}, but the observation is no stack of frames")
            writer.append({"observation": next_obs[i][-1]})
            timeout = self.handle_timeout_termination and infos[i].get("TimeLimit.truncated", False)
            ends = {"reward": [float(reward[i])], "done": [float(done[i] and not timeout)]}
            writer.add_item(values={"action": action, **ends}, frame=-2, next_frame=-1)
            self.newest[i] = None if done[i] else next_obs[i]

    def sample(self, batch_size, env=None):
        if self.sampler is None or self.batch_size != batch_size:
            self._open_sampler(batch_size)
        if not self.batches:  # Small batches are drawn several at a time.
            drawn = self.sampler.sample(timeout=60)
            arrays = [drawn[name] for name in ("observation", "action", "next_observation", "done", "reward")]
            shapes = [self.obs_shape, (self.action_dim,), self.obs_shape, (1,), (1,)]
            parts = (a.reshape(batch_size, -1, *shape) for a, shape in zip(arrays, shapes, strict=True))
            self.batches = list(zip(*(np.ascontiguousarray(part.swapaxes(0, 1)) for part in parts), strict=True))
        obs, action, next_obs, done, reward = self.batches.pop()
        data = self._normalize_obs(obs, env), action, self._normalize_obs(next_obs, env), done
        return ReplayBufferSamples(
            *(self.to_torch(a, copy=False) for a in (*data, self._normalize_reward(reward, env)))
        )

    def _open_sampler(self, batch_size):
        for writer in self.writers:
            writer.flush(timeout=60)  # so that there is something to draw
        if self.sampler:
            self.sampler.close()
        num_bytes = 2 * batch_size * self.observation_space.dtype.itemsize * int(np.prod(self.obs_shape))
        ahead = max(1, min(AHEAD, AHEAD_BYTES // num_bytes))
        self.sampler = self.client.sampler(TABLE, batch_size * ahead)
        self.batch_size, self.batches = batch_size, []

    def size(self):
        return self.client.status().tables[TABLE].replay.size // self.n_envs

    def reset(self):
        raise NotImplementedError("a server's table cannot be emptied: make a new buffer")

    def __reduce__(self):
        raise TypeError("the transitions are in the server: leave out save_replay_buffer, and pass snapshots=FOLDER")
