"""A custom network: residual blocks with LayerNorm below dueling heads.

    cd examples
    python custom_network.py                                  train CartPole until solved
    python custom_network.py --max-updates 200                end after 200 updates at the latest
    apex train --preset cartpole --network custom_network:make_network

A factory takes the schema of the transitions and returns any torch.nn.Module that maps observations, frame_dtype[B, S,
*F], to Q-values, float32[B, A]. The programs of a run import it by its name.
"""

import argparse
from math import prod

from torch import nn

import apex

WIDTH = 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.layers(x)


class ResidualNetwork(nn.Module):
    """Uses LayerNorm instead of BatchNorm, because batches of actors are much smaller than those of the learner."""

    def __init__(self, num_values, num_actions):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(num_values, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH))
        self.advantage = nn.Linear(WIDTH, num_actions)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, observation):
        features = self.body(observation)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(1, keepdim=True)


def make_network(schema):
    return ResidualNetwork(prod(schema.observation_shape), schema.num_actions)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-updates", type=int, default=0)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    config = apex.preset(
        "cartpole",
        network={"factory": "custom_network:make_network"},
        run={"tensorboard": False, "max_updates": options.max_updates, "folder": options.folder},
    )
    run = apex.train(config)
    policy = apex.load_policy(run)
    size = sum(parameter.numel() for parameter in policy.network.parameters())
    print(f"{run.reason}; {size:,} parameters; mean of 20 new games: {apex.evaluate(run, episodes=20).mean:.1f}")


if __name__ == "__main__":
    main()
