"""Compares the replay buffer of examples/ with Stable-Baselines3's own: python sb3_twin.py CHECK. Prints "ok"."""

import copy
import sys
import tempfile
import time
from contextlib import suppress

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from sb3_replay_buffer import ServerReplayBuffer
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer

ACTIONS = spaces.Discrete(50)


def rows(samples):
    """Returns each transition of the samples once, as bytes."""
    names = ("observations", "actions", "next_observations", "dones", "rewards")
    arrays = [getattr(samples, name).numpy() for name in names]
    return {b"".join(array[k].tobytes() for array in arrays) for k in range(len(arrays[0]))}


def compare(space, make_observation, num_envs, **options):
    """Adds the same episodes to both buffers, and compares all of their transitions."""
    rng = np.random.default_rng(1)
    twin = ReplayBuffer(400, space, ACTIONS, device="cpu", n_envs=num_envs)
    ours = ServerReplayBuffer(
        400, space, ACTIONS, device="cpu", n_envs=num_envs, segment_length=7, max_bytes=1_000_000, **options
    )
    ages = np.zeros(num_envs, int)
    obs = np.stack([make_observation(env, 0, 0) for env in range(num_envs)])
    for step in range(1, 400 // num_envs + 1):
        ages += 1
        if step == 30:  # A reset without an end, as at the start of `learn`.
            ages[:] = 1
            obs = np.stack([make_observation(env, step - 1, 0) for env in range(num_envs)])
        first = step - ages
        following = np.stack([make_observation(env, first[env], ages[env]) for env in range(num_envs)])
        done, timeout = rng.random(num_envs) < 0.2, rng.random(num_envs) < 0.5
        infos = [{"TimeLimit.truncated": bool(each)} for each in done & timeout]
        given = obs, following, np.arange(num_envs) + step % 40, rng.random(num_envs).astype(np.float32), done, infos
        twin.add(*given)
        ours.add(*given)
        ages[done] = 0
        obs = np.stack([make_observation(env, step, 0) if done[env] else following[env] for env in range(num_envs)])
    for writer in ours.writers:
        writer.flush(60)
    found = ours.sample(20)
    for name in found._fields[:5]:
        mine, own = getattr(found, name), getattr(twin.sample(20), name)
        assert (mine.shape, mine.dtype) == (own.shape, own.dtype), name
    every = twin._get_samples(np.arange(twin.size()).repeat(60))  # its environments are drawn at random
    drawn = set().union(*(rows(ours.sample(64)) for _ in range(120)))
    assert drawn == rows(every), (len(drawn), len(rows(every)))
    ours.server.close()


def vectors():
    """Vectors of two environments: an observation has the numbers of its environment, episode and step."""
    space = spaces.Box(-1e6, 1e6, (3,), np.float32)
    compare(space, lambda env, first, age: np.float32([env, first, age]), 2)


def stacks():
    """Stacks of four images, channels first, which begin with zeros."""

    def frame(env, first, age):
        return np.full((6, 5), 1 + (first * 7 + age) % 250 if age >= 0 else 0, np.uint8)

    space = spaces.Box(0, 255, (4, 6, 5), np.uint8)
    compare(
        space, lambda env, first, age: np.stack([frame(env, first, age - k) for k in (3, 2, 1, 0)]), 1, frame_stack=4
    )


def refusals():
    """What the buffer cannot do has an error that says so."""
    box = spaces.Box(0, 1, (4,), np.float32)
    refused = []
    for space, options in ((spaces.Dict(x=box), {}), (box, {"optimize_memory_usage": True})):
        with suppress(ValueError):
            ServerReplayBuffer(10, space, ACTIONS, **options)
            refused.append(space)
    buffer = ServerReplayBuffer(100, box, ACTIONS, frame_stack=2)
    step = np.ones((1, 4)), 2 * np.ones((1, 4)), np.array([1]), np.array([1.0]), np.array([False]), [{}]
    calls = {"add": lambda: buffer.add(*step), "reset": buffer.reset, "save": lambda: copy.copy(buffer)}
    for name, call in calls.items():
        with suppress(ValueError, NotImplementedError):
            call()
            refused.append(name)
    assert not refused, refused
    buffer.server.close()


def learning():
    """DQN trains with it; a server with a folder of snapshots has the transitions again."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"buffer_size": 1_000, "learning_starts": 100, "device": "cpu", "seed": 1}
        buffer = {"replay_buffer_class": ServerReplayBuffer, "replay_buffer_kwargs": {"snapshots": f"{folder}/saved"}}
        model = DQN("MlpPolicy", "CartPole-v1", **buffer, **options)
        model.learn(600)
        assert model._n_updates == 125
        assert torch.isfinite(next(model.q_net.parameters())).all()
        model.save(f"{folder}/model")
        for writer in model.replay_buffer.writers:
            writer.flush(60)
        model.replay_buffer.server.close()
        again = DQN.load(f"{folder}/model", gymnasium.make("CartPole-v1")).replay_buffer
        deadline = time.monotonic() + 60
        while again.client.status().tables["transitions"].replay is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert again.size() == 600
        again.server.close()


if __name__ == "__main__":
    {"vectors": vectors, "stacks": stacks, "refusals": refusals, "learning": learning}[sys.argv[1]]()
    print("ok")
