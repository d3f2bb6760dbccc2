#!/usr/bin/env python3
"""Compares the speed of Stable-Baselines3's DQN with its own replay buffer and with that of examples/, in turns.

bench/peers/setup.sh && .peer-sb3/bin/pip install ./apexreplay
.peer-sb3/bin/python bench/peers/sb3_buffers.py --env CartPole-v1 --steps 4000 --pairs 9
.peer-sb3/bin/python bench/peers/sb3_buffers.py --env ALE/Pong-v5 --steps 1500 --pairs 7

A pair is one training with each buffer, with the same seed and the settings of the zoo. A line has their steps per
second and the ratio; the last one has the medians. Torch has one thread: the server shares the cores.
"""

import argparse
import importlib
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3_dqn import _make_model
from zoo_settings import TASKS

sys.path[:0] = [str(Path(__file__).parents[2] / "examples")]
ServerReplayBuffer = importlib.import_module("sb3_replay_buffer").ServerReplayBuffer
WARM_UP = 1_200  # steps until both train, not measured


def measure(environment: str, steps: int, seed: int, buffer: type[ReplayBuffer], **options: int) -> float:
    """Returns the steps per second of a training."""
    task = TASKS["dqn"][environment]
    classes = {"replay_buffer_class": buffer, "replay_buffer_kwargs": options}
    model = _make_model("dqn", task, environment, seed, **classes, buffer_size=20_000, learning_starts=1_000)
    model.learn(WARM_UP)
    began = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    seconds = time.perf_counter() - began
    if isinstance(model.replay_buffer, ServerReplayBuffer):
        model.replay_buffer.server.close()
    return steps / seconds


def main() -> None:
    """Prints the rates of each pair, and their medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", choices=list(TASKS["dqn"]), default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stack = {"frame_stack": 4, "max_bytes": 200_000_000} if TASKS["dqn"][options.env].is_atari else {}
    pairs = []
    for seed in range(options.pairs):
        turns = [(ReplayBuffer, {}), (ServerReplayBuffer, stack)][:: 1 if seed % 2 else -1]
        rates = {buffer: measure(options.env, options.steps, seed, buffer, **more) for buffer, more in turns}
        pairs.append((rates[ReplayBuffer], rates[ServerReplayBuffer]))
        own, ours = pairs[-1]
        print(f"{own:7.1f} {ours:7.1f} {ours / own:.3f}  load {os.getloadavg()[0]:.1f}", flush=True)
    own, ours, ratio = (statistics.median(each) for each in zip(*((a, b, b / a) for a, b in pairs), strict=True))
    print(f"{own:7.1f} {ours:7.1f} {ratio:.3f}  medians")


if __name__ == "__main__":
    main()
