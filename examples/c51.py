"""C51 (Bellemare et al. 2017): apex train --preset cartpole --algorithm c51:C51. See docs/tutorials/algorithm.md."""

from dataclasses import replace

import torch
from torch import nn

from apex.algorithms.gradient_step import Updated
from apex.algorithms.optimizers import clip_gradients, step_where_finite
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.networks import make_network

# The returns of CartPole are at most 1 / (1 - gamma) = 100. The paper has -10 ... 10 for Atari.
ATOMS, LOW, HIGH = 51, 0.0, 100.0


def project(probability, n_step_return, discount, atoms):
    """Divides the probability of each R + discount * z between two atoms (equation 7)."""
    tz = (n_step_return[:, None] + discount[:, None] * atoms).clamp(atoms[0], atoms[-1])
    distance = (tz[:, None] - atoms[:, None]).abs() / (atoms[1] - atoms[0])  # [B, N, N]
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
        self.config, self.torch_threads = config, max(1, config.num_threads)

    def __call__(self, batch):
        (state, next_state), action, n_step_return, discount, weights, mask = batch
        rows = torch.arange(len(action), device=action.device)
        with torch.no_grad():
            q = self.online(next_state)
            choice = (q if mask is None else q.masked_fill(~mask, -torch.inf)).argmax(1)
            goal = self.target.log_probability(next_state)[rows, choice].exp()
            goal = project(goal, n_step_return, discount, self.online.atoms)
        cross_entropy = -(goal * self.online.log_probability(state)[rows, action]).sum(1)
        loss = (weights * cross_entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients([*self.online.parameters()], self.config.max_gradient_norm)
        finite = torch.isfinite(loss + norm)
        step_where_finite(finite, self.optimizer)
        stats = {"loss": loss.detach(), "mean_q": q.amax(1).mean(), "gradient_norm": norm}
        return Updated(cross_entropy.detach(), finite, stats)


class C51(DqnAlgorithm):
    name, make_exported = "c51", None  # `apex export` cannot describe this network.

    def make_network(self):
        schema = replace(self.schema, num_actions=self.schema.num_actions * ATOMS)
        config = replace(self.config.network, dueling=False)
        return Distribution(make_network(config, schema, seed=self.config.seed))

    def make_update(self, online, target, optimizer, device):
        return CrossEntropyUpdate(self.config.learner, online, target, optimizer)
