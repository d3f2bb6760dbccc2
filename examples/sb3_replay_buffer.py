"""A replay buffer of Stable-Baselines3 on a server of its own, or on the one at `address`: docs/guide/adapters.md."""

import numpy as np
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, ReplayBufferSamples

from apexreplay import Client, TableSettings, Window, serve, table


class ServerReplayBuffer(ReplayBuffer):
    def __init__(self, size, *spaces, device="auto", n_envs=1, frame_stack=1, address=None, snapshots=None, **limits):
        BaseBuffer.__init__(self, size, *spaces, device=device, n_envs=n_envs)
        self.handle_timeout_termination = limits.pop("handle_timeout_termination", True)
        if limits.pop("optimize_memory_usage", False) or not isinstance(self.obs_shape, tuple):
            raise ValueError("leave out optimize_memory_usage, and use observations that are arrays")
        self.stack = (frame_stack, self.obs_shape[0] // frame_stack, *self.obs_shape[1:])
        step = {"observation": (self.observation_space.dtype, self.stack[1:])}
        action = (self._maybe_cast_dtype(self.action_space.dtype), (self.action_dim,))
        values = {"action": action, "reward": "float32", "done": "float32"}
        transitions = table("transitions", step, item=Window(stack=frame_stack, span=1), values=values)
        limits = {"capacity": size, "priority_exponent": 0, **limits}
        self.server = None if address else serve([TableSettings(table=transitions, **limits)], snapshots=snapshots)
        self.client = Client(*address, keys=limits.get("keys")) if address else self.server.client()
        self.writers = [self.client.writer("transitions") for _ in range(n_envs)]
        self.newest, self.batches = [None] * n_envs, {}  # last observation of each environment; batches by size

    def add(self, obs, next_obs, action, reward, done, infos):
        obs, next_obs = (np.array(each).reshape(self.n_envs, *self.stack) for each in (obs, next_obs))
        for i, writer in enumerate(self.writers):
            if not np.array_equal(obs[i], self.newest[i]):  # An episode begins.
                writer.end_episode()
                for frame in obs[i]:
                    writer.append({"observation": frame})
            if not np.array_equal(obs[i][1:], next_obs[i][:-1]):
                raise ValueError(f"these observations are no stacks of {len(obs[i])} frames, oldest first")
            writer.append({"observation": next_obs[i][-1]})
            ends = done[i] and not (self.handle_timeout_termination and infos[i].get("TimeLimit.truncated", False))
            writer.add_item(values={"action": np.ravel(action[i]), "reward": reward[i], "done": ends}, frame=-2)
            self.newest[i] = None if done[i] else next_obs[i]

    def sample(self, batch_size, env=None):
        obs, next_obs, action, reward, done = next(self.batches.setdefault(batch_size, self._draw(batch_size)))
        ends = (done, self._normalize_reward(reward, env))
        arrays = (self._normalize_obs(obs, env), action, self._normalize_obs(next_obs, env), *ends)
        return ReplayBufferSamples(*(self.to_torch(array, copy=False) for array in arrays))

    def _draw(self, size):
        ahead = max(1, min(16, 2**17 // (size * int(np.prod(self.obs_shape)))))  # small batches drawn together
        shapes = [(size, ahead, *each) for each in (self.obs_shape, self.obs_shape, (self.action_dim,), (1,), (1,))]
        for batch in self.client.sampler("transitions", size * ahead):
            fields = zip(batch.fields.values(), shapes, strict=True)
            yield from zip(*(array.reshape(shape).swapaxes(0, 1) for array, shape in fields), strict=True)

    def size(self):
        return self.client.status().tables["transitions"].replay.size // self.n_envs

    def reset(self, *protocol):
        raise NotImplementedError("the server has the transitions: pass snapshots=FOLDER to keep them")

    __reduce_ex__ = reset  # model.save_replay_buffer
