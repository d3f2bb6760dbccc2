"""Batches and a naive NumPy twin of Ape-X DPG, which computes every derivative row by row and critic by critic."""

import copy

import numpy as np
import torch

from apex.algorithms.gradient_step import DeviceBatch
from apex.config import Config, DpgConfig, LearnerConfig, SacConfig
from apex.schema import Schema

D, K, B = 3, 2, 6
SCHEMA = Schema(
    frame_shape=(D,), frame_dtype="float32", stack=1, num_actions=0, n_step=5, codec="raw", action_size=K, masked=False
)
CPU = torch.device("cpu")
SMALL = {"policy_units": 5, "policy_units_2": 4, "critic_units": 7, "critic_units_2": 6}


def make_batch(seed=0, **changes):
    rng = np.random.default_rng(seed)
    rows = {
        "stacks": rng.normal(size=(2, B, 1, D)),
        "action": rng.uniform(-1, 1, (B, K)),
        "n_step_return": rng.normal(size=B),
        "discount": np.where(rng.random(B) < 0.3, 0, 0.95),
        "weights": rng.uniform(0.1, 1, B),
        **changes,
    }
    return DeviceBatch(**{name: torch.from_numpy(np.asarray(row, np.float32)) for name, row in rows.items()})


def make_step(algorithm_class, seed=1, learner=None, sac=None, **settings):
    """Returns an update, its different online and target networks, its optimizer and its configuration."""
    defaults = {"optimizer": "adam", "learning_rate": 0.01, "optimizer_epsilon": 1e-4, "num_threads": 1}
    config = Config(
        seed=seed,
        learner=LearnerConfig(**{**defaults, **(learner or {})}),
        dpg=DpgConfig(**{**SMALL, **settings}),
        sac=SacConfig(**(sac or {})),
    )
    algorithm = algorithm_class(config, SCHEMA)
    online, target = algorithm.make_network(), algorithm.make_network()
    with torch.no_grad():
        if online.normalizer is not None:  # Both have statistics of different rows.
            for normalizer, number in ((online.normalizer, 1.0), (target.normalizer, 2.0)):
                normalizer.mean += 0.25 * number
                normalizer.variance *= number
                normalizer.count += 10 * number
        for parameter in online.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    optimizer = algorithm.make_optimizer(online)
    return algorithm.make_update(online, target, optimizer, CPU), online, target, optimizer, config


def contents(online, optimizer):
    state = copy.deepcopy((online.state_dict(), optimizer.state_dict()["state"]))
    return [tensor for part in state for tensor in flat(part)]


def flat(tree):
    return [leaf for value in tree.values() for leaf in flat(value)] if isinstance(tree, dict) else [tree]


class Twin:
    """Networks as lists of (weight [in, out], bias [out]); float64; Adam."""

    def __init__(self, network, settings, learner):
        state = {name: tensor.numpy().astype(np.float64) for name, tensor in network.state_dict().items()}
        layers = ("hidden1", "hidden2", "output")
        self.policy = [
            (state[f"policy.{name}.weight"].T.copy(), state[f"policy.{name}.bias"].copy()) for name in layers
        ]
        self.critics = [
            [(state[f"critics.{name}.weight"][c].copy(), state[f"critics.{name}.bias"][c, 0].copy()) for name in layers]
            for c in range(settings.num_critics)
        ]
        self.settings, self.learner = settings, learner
        self.statistics = None  # mean, variance and number of rows
        if network.normalizer is not None:
            self.statistics = [state[f"normalizer.{name}"].copy() for name in ("mean", "variance", "count")]
        self.first = np.tanh if settings.first_activation == "tanh" else lambda x: np.maximum(x, 0)
        self.moments = {}
        self.count = 0

    def forward(self, layers, x):
        one = self.first(x @ layers[0][0] + layers[0][1])
        two = np.maximum(one @ layers[1][0] + layers[1][1], 0)
        return (x, one, two), two @ layers[2][0] + layers[2][1]

    def backward(self, layers, passed, slope):
        """Returns the gradients of the layers and of the input, from `slope`, the derivative of the last layer's
        output.
        """
        x, one, two = passed
        gradients = [None, None, (np.outer(two, slope), slope)]
        slope = (layers[2][0] @ slope) * (two > 0)
        gradients[1] = np.outer(one, slope), slope
        slope = layers[1][0] @ slope
        slope = slope * (1 - one**2) if self.first is np.tanh else slope * (one > 0)
        gradients[0] = np.outer(x, slope), slope
        return gradients, layers[0][0] @ slope

    def normalize(self, x):
        if self.statistics is None:
            return x
        mean, variance, _ = self.statistics
        return np.clip((x - mean[0]) / np.maximum(np.sqrt(variance[0]), 1e-3), -10, 10)

    def count_in(self, rows):
        """Adds rows [B, 1, D] to the statistics, computed from the sums of values and squares."""
        mean, variance, count = self.statistics
        both = count + len(rows)
        square = (count * (variance + mean**2) + (rows**2).sum(0)) / both
        mean = (count * mean + rows.sum(0)) / both
        self.statistics = [mean, square - mean**2, both]

    def act(self, x):
        passed, out = self.forward(self.policy, x)
        return passed, np.tanh(out)

    def update(self, target, batch):
        """Makes one update; `target`: another Twin. Returns |TD errors|, and the losses of critics and policy."""
        rows = [row.numpy().astype(np.float64) for row in batch.tensors]
        (seen, following), actions, returns, discounts, weights = rows
        critic_sums = [[[0.0, 0.0] for _ in range(3)] for _ in self.critics]
        policy_sums = [[0.0, 0.0] for _ in range(3)]
        td_errors, loss, policy_loss = [], 0.0, 0.0
        for s, s2, a, r, discount, weight in zip(
            seen[:, 0], following[:, 0], actions, returns, discounts, weights, strict=True
        ):
            s, s2 = self.normalize(s), target.normalize(s2)
            _, a2 = target.act(s2)
            bootstrap = min(target.forward(layers, np.concatenate([s2, a2]))[1][0] for layers in target.critics)
            y = r + discount * bootstrap
            deltas = []
            for layers, sums in zip(self.critics, critic_sums, strict=True):
                passed, (q,) = self.forward(layers, np.concatenate([s, a]))
                deltas.append(y - q)
                loss += weight * (y - q) ** 2 / 2 / B
                gradients, _ = self.backward(layers, passed, np.array([-weight * (y - q) / B]))
                add(sums, gradients)
            td_errors.append(abs(np.mean(deltas)))
            passed_policy, mu = self.act(s)
            passed, (q,) = self.forward(self.critics[0], np.concatenate([s, mu]))
            policy_loss -= weight * q / B
            _, by_input = self.backward(self.critics[0], passed, np.array([1.0]))
            bound = self.settings.action_gradient_clip or np.inf
            slope = np.clip(by_input[D:], -bound, bound)
            gradients, _ = self.backward(self.policy, passed_policy, -weight / B * slope * (1 - mu**2))
            add(policy_sums, gradients)
        self.count += 1
        if self.statistics is not None:
            self.count_in(seen)
        clip([part for sums in critic_sums for pair in sums for part in pair], self.learner.max_gradient_norm)
        for c, (layers, sums) in enumerate(zip(self.critics, critic_sums, strict=True)):
            self.adam(f"critic{c}", layers, sums, self.learner.learning_rate)
        clip([part for pair in policy_sums for part in pair], self.learner.max_gradient_norm)
        share = self.settings.policy_learning_rate_share
        self.adam("policy", self.policy, policy_sums, share * self.learner.learning_rate)
        return np.array(td_errors), loss, policy_loss

    def adam(self, name, layers, gradients, rate):
        for i, (pair, sums) in enumerate(zip(layers, gradients, strict=True)):
            for j, (parameter, gradient) in enumerate(zip(pair, sums, strict=True)):
                m, v = self.moments.get((name, i, j), (0.0, 0.0))
                m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
                self.moments[name, i, j] = m, v
                step = (m / (1 - 0.9**self.count)) / (
                    np.sqrt(v / (1 - 0.999**self.count)) + self.learner.optimizer_epsilon
                )
                parameter -= rate * step

    def state(self):
        """Returns the tensors with the names and shapes of the network's state dict."""
        names = ("mean", "variance", "count")
        state = {f"normalizer.{name}": part for name, part in zip(names, self.statistics or (), strict=False)}
        for i, name in enumerate(("hidden1", "hidden2", "output")):
            state[f"policy.{name}.weight"], state[f"policy.{name}.bias"] = self.policy[i][0].T, self.policy[i][1]
            state[f"critics.{name}.weight"] = np.stack([layers[i][0] for layers in self.critics])
            state[f"critics.{name}.bias"] = np.stack([layers[i][1] for layers in self.critics])[:, None]
        return state


def add(sums, gradients):
    for total, pair in zip(sums, gradients, strict=True):
        total[0], total[1] = total[0] + pair[0], total[1] + pair[1]


def clip(gradients, most):
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    for gradient in gradients:
        gradient *= min(1.0, most / (norm + 1e-6))
