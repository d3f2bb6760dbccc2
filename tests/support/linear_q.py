"""A user's own algorithm: one-step Q-learning of a linear function. Its name is `support.linear_q:LinearQ`."""

import numpy as np
import torch
from torch import nn

from apex.algorithms.gradient_step import Updated
from apex.algorithms.interface import Decision
from apex.types import Exploration


class Agent:
    def __init__(self, network):
        self.network = network

    @torch.inference_mode()
    def q(self, observation):
        return self.network(torch.from_numpy(observation)).numpy()

    def decide(self, observation, mask, exploration, rng):
        q, rows = self.q(observation), np.arange(len(observation))
        explores, random = rng.random(len(q)) < exploration, rng.integers(q.shape[1], size=len(q))
        return Decision(np.where(explores, random, q.argmax(1)), q.max(1), lambda action: q[rows, action])

    def state_value(self, observation, mask):
        return self.q(observation).max(1)

    def act(self, observation, mask, exploration, rng):
        return self.decide(observation, mask, np.full(len(observation), exploration), rng).action


class Update:
    torch_threads = 1

    def __init__(self, online, target, optimizer):
        self.online, self.target, self.optimizer = online, target, optimizer

    def __call__(self, batch):
        with torch.no_grad():
            y = batch.n_step_return + batch.discount * self.target(batch.stacks[1]).amax(1)
        q = self.online(batch.stacks[0])
        delta = y - q.gather(1, batch.action[:, None])[:, 0]
        loss = (batch.weights * delta.square()).mean()
        finite = torch.isfinite(loss)
        if finite:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return Updated(
            delta.detach().abs(), finite, {"loss": loss.detach(), "bias": self.online[1].bias.detach().mean()}
        )


class LinearQ:
    name = "linear-q"

    def __init__(self, config, schema):
        self.config, self.schema = config, schema

    def exploration(self, num_actors):
        return Exploration("epsilon", np.linspace(0.5, 0.05, num_actors))

    def make_network(self):
        torch.manual_seed(self.config.seed)
        size = int(np.prod(self.schema.observation_shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(size, self.schema.num_actions))

    def make_agent(self, network, *, bfloat16=False):
        return Agent(network)

    def make_optimizer(self, online):
        return torch.optim.SGD(online.parameters(), lr=self.config.learner.learning_rate)

    def make_update(self, online, target, optimizer, device):
        return Update(online, target, optimizer)
