"""An algorithm of your own: C51 (Bellemare et al. 2017). docs/tutorials/algorithm.md explains each part.

In this folder: apex train --preset cartpole --algorithm c51:C51
"""

from dataclasses import replace

import torch
from torch import nn

from apex.algorithms.gradient_step import Updated
from apex.algorithms.optimizers import clip_gradients, step_where_finite
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.networks import make_network

ATOMS, LOW, HIGH = 51, 0.0, 100.0  # CartPole's returns are at most 1 / (1 - gamma). The paper has -10 ... 10 for Atari.


def project(probability, n_step_return, discount, atoms):
    """Divides the probability of each R + discount * z among the two atoms beside it (equation 7), float32[B, N]."""
    value = (n_step_return[:, None] + discount[:, None] * atoms).clamp(atoms[0], atoms[-1])
    distance = (value[:, None] - atoms[:, None]).abs() / (atoms[1] - atoms[0])  # [B, N atoms, N values]
    return ((1 - distance).clamp(min=0) @ probability[:, :, None])[:, :, 0]


class Distribution(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body  # frame_dtype[B, S, *F] -> float32[B, A * N]
        self.register_buffer("atoms", torch.linspace(LOW, HIGH, ATOMS), persistent=False)

    def log_probability(self, observation):  # float32[B, A, N]
        return self.body(observation).unflatten(1, (-1, ATOMS)).log_softmax(2)

    def forward(self, observation):  # Q-values, float32[B, A]
        return self.log_probability(observation).exp() @ self.atoms


class CrossEntropyUpdate:
    def __init__(self, config, online, target, optimizer):
        self.online, self.target, self.optimizer = online, target, optimizer
        self.torch_threads, self.max_norm = max(1, config.num_threads), config.max_gradient_norm

    def __call__(self, batch):
        rows = torch.arange(len(batch.action), device=batch.action.device)
        with torch.no_grad():
            q = self.online(batch.stacks[1])
            allowed = q if batch.next_mask is None else q.masked_fill(~batch.next_mask, -torch.inf)
            goal = self.target.log_probability(batch.stacks[1])[rows, allowed.argmax(1)].exp()  # double Q-learning
            goal = project(goal, batch.n_step_return, batch.discount, self.online.atoms)
        cross_entropy = -(goal * self.online.log_probability(batch.stacks[0])[rows, batch.action]).sum(1)
        loss = (batch.weights * cross_entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(list(self.online.parameters()), self.max_norm)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        step_where_finite(finite, self.optimizer)
        figures = {"loss": loss.detach(), "mean_q": q.amax(1).mean(), "gradient_norm": norm}
        return Updated(cross_entropy.detach(), finite, figures)  # Cross-entropies become the priorities.


class C51(DqnAlgorithm):
    name, make_exported = "c51", None  # `apex export` would describe a network whose outputs are Q-values.

    def make_network(self):
        wide = replace(self.schema, num_actions=self.schema.num_actions * ATOMS)
        return Distribution(make_network(replace(self.config.network, dueling=False), wide, seed=self.config.seed))

    def make_update(self, online, target, optimizer, device):
        return CrossEntropyUpdate(self.config.learner, online, target, optimizer)
