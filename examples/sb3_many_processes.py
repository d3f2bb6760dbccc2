"""16 processes step environments and feed one learner of Stable-Baselines3: python examples/sb3_many_processes.py"""

import argparse
import multiprocessing
import random

import gymnasium
import numpy as np
import torch
from sb3_replay_buffer import ServerReplayBuffer
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import polyak_update


def act(number, num_processes, q_net, address):
    """Steps an environment until the learner ends. `q_net` is in shared memory, and the learner changes it."""
    torch.set_num_threads(1)
    env = gymnasium.make("CartPole-v1")
    buffer = ServerReplayBuffer(1, env.observation_space, env.action_space, address=address)
    epsilon = 1 - number / num_processes  # Each process explores at its own rate.
    observation, _ = env.reset(seed=number)
    while True:
        action = q_net._predict(torch.as_tensor(observation)[None]).numpy()
        if random.random() < epsilon:
            action = np.array([env.action_space.sample()])
        following, reward, terminated, truncated, _ = env.step(action[0])
        ended, info = terminated or truncated, {"TimeLimit.truncated": truncated and not terminated}
        buffer.add(observation, following, action, [reward], [ended], [info])
        observation = env.reset()[0] if ended else following


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--updates", type=int, default=15_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    limits = {"min_size": 1_000, "samples_per_insert": 32.0, "tolerance": 0.5, "inserts_wait": True}
    buffer = {"buffer_size": 50_000, "replay_buffer_class": ServerReplayBuffer, "replay_buffer_kwargs": limits}
    model = DQN("MlpPolicy", "CartPole-v1", learning_rate=1e-3, gamma=0.98, seed=1, device="cpu", **buffer)
    model.set_logger(configure(format_strings=[]))
    server, processes = model.replay_buffer.server, multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["sb3_replay_buffer"])  # Torch is loaded once for all of them.
    shared = options.processes, model.q_net.share_memory(), (server.host, server.port)
    for number in range(options.processes):
        processes.Process(target=act, args=(number, *shared), daemon=True).start()
    for updates in range(100, options.updates + 1, 100):
        model.train(gradient_steps=100, batch_size=64)
        polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), 1.0)
        if updates % 1_000 == 0 or updates == options.updates:
            score, spread = evaluate_policy(model, gymnasium.make("CartPole-v1"), n_eval_episodes=10, warn=False)
            steps = model.replay_buffer.client.status().tables["transitions"].replay.num_inserted
            print(f"{updates:,} updates, {steps:,} steps: {score:.0f} +- {spread:.0f}", flush=True)
