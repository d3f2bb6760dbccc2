"""Train, load, play: cells of a notebook, or a script. The stop button or Ctrl-C ends training and saves the policy.

python examples/notebook_loop.py
python examples/notebook_loop.py --max-updates 200
"""

# %% Train. In a notebook, replace the options by values, such as run={"max_minutes": 2}.
import argparse

import gymnasium

import apex

parser = argparse.ArgumentParser()
parser.add_argument("--max-updates", type=int, default=0)
parser.add_argument("--folder", default="runs")
options, _ = parser.parse_known_args()
limits = {"max_updates": options.max_updates, "folder": options.folder, "tensorboard": False}
config = apex.preset("cartpole", run=limits)
run = apex.train(config, quiet=True)
print(f"{run.reason}: {run.steps:,} steps, {run.seconds:.0f} s, in {run.folder}")

# %% Load. The policy takes an observation of the environment, or a batch, and returns the action for env.step.
policy = apex.load_policy(run)
env = gymnasium.make("CartPole-v1")

# %% Play one game.
observation, _ = env.reset(seed=1)
score, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, _ = env.step(policy(observation))
    score += reward
    ended = terminated or truncated
print(f"one greedy game: {score:.0f}; Q of its last state: {policy.q_values(policy.prepare(observation)).round(2)}")
