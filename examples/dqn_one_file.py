"""DQN in one file, in CleanRL's manner, with a prioritized replay server: python examples/dqn_one_file.py --seed 1"""

import argparse
import copy
import random

import gymnasium
import numpy as np
import torch
from torch import nn

from apexreplay import TableSettings, serve, table

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--steps", type=int, default=40_000)
args = parser.parse_args()
GAMMA, BATCH, START, TRAIN_PERIOD, TARGET_PERIOD, LAST_EPSILON, BETA = 0.99, 64, 1_000, 2, 256, 0.01, 0.4

random.seed(args.seed)
torch.manual_seed(args.seed)
torch.set_num_threads(1)
env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"), buffer_length=20)
online = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
target = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
vectors = dict.fromkeys(("observation", "next_observation"), ("float32", (4,)))
steps = table("steps", {**vectors, "action": "int64", "reward": "float32", "discount": "float32"})
settings = TableSettings(table=steps, capacity=50_000, min_size=START // 2, priority_exponent=0.6)
with (
    serve([settings]) as server,
    server.client() as client,
    client.writer("steps") as writer,
    client.sampler("steps", BATCH) as sampler,
):
    observation, _ = env.reset(seed=args.seed)
    for step in range(args.steps):
        action = int(online(torch.as_tensor(observation)).argmax())
        if random.random() < max(LAST_EPSILON, 1 - step / (0.2 * args.steps)):
            action = random.randrange(2)
        following, reward, terminated, truncated, _ = env.step(action)
        row = {"observation": observation, "next_observation": following, "action": action, "reward": reward}
        writer.append({**row, "discount": GAMMA * (not terminated)})
        observation = env.reset()[0] if terminated or truncated else following
        if step >= START and step % TRAIN_PERIOD == 0:
            batch = sampler.sample()
            s, s2, a, r, discount = (torch.as_tensor(batch[name]) for name, _ in steps.steps)
            with torch.no_grad():  # double Q-learning
                goal = r + discount * target(s2).gather(1, online(s2).argmax(1, keepdim=True))[:, 0]
            error = online(s).gather(1, a[:, None])[:, 0] - goal
            weights = torch.as_tensor((batch.num_items * batch.probabilities) ** -BETA).float()
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / args.steps)  # The last policies differ little.
            optimizer.zero_grad()
            (weights / weights.max() * nn.functional.huber_loss(error, 0 * error, reduction="none")).mean().backward()
            nn.utils.clip_grad_norm_(online.parameters(), 10.0)
            optimizer.step()
            sampler.update_priorities(batch, error.detach().abs().numpy())
        if step % TARGET_PERIOD == 0:
            target.load_state_dict(online.state_dict())
print(f"seed {args.seed}: mean score of the last 20 games {np.mean(env.return_queue):.1f}")
