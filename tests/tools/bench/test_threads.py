"""`python -m bench threads`: all four ways make the same update."""

import pytest
import torch
from support.builders import VECTORS
from support.native import skip_without_convolution

from apex.algorithms.gradient_step import DeviceBatch
from apex.config import Config, LearnerConfig, NetworkConfig
from apex.schema import Schema
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.learner import Resident
from bench.threads import WAYS, make_ways, measure

PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
NETWORK = NetworkConfig(width=0.25, hidden=64, body_hidden=64)


def make_config(**learner):
    return Config(learner=LearnerConfig(**{"batch_size": 8, "optimizer": "adam", **learner}), network=NETWORK)


def make_batch(schema):
    batch = Resident(schema, 8).receive(0.0)
    weights = torch.linspace(0.2, 1.0, 8)
    arrays = batch.stacks, batch.action, batch.n_step_return, batch.discount
    return DeviceBatch(*map(torch.from_numpy, arrays), weights)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("schema", [PIXELS, VECTORS], ids=["images", "vectors"])
@pytest.mark.parametrize("settings", [{}, {"max_gradient_norm": 0.01}, {"centered_gradients": True}])
def test_all_ways_have_the_same_gradients_and_errors(schema, settings):
    skip_without_convolution()
    found = {}
    for way, (update, network) in make_ways(make_config(**settings), schema).items():
        errors = update(make_batch(schema)).td_errors
        found[way] = [errors.detach(), *(parameter.grad for parameter in network.parameters())]
    for way in WAYS:
        for got, expected in zip(found[way], found["autograd"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_second_half_uses_the_newest_weights_in_bfloat16():
    """After two steps of 0.01, the errors of old weights would differ by far more than by rounding."""
    steps = make_ways(make_config(bfloat16="on", learning_rate=0.01), PIXELS)
    for _ in range(3):
        errors = {way: steps[way][0](make_batch(PIXELS)).td_errors for way in ("one", "halves")}
    torch.testing.assert_close(errors["halves"], errors["one"], rtol=0.05, atol=0.05)


def test_an_odd_batch_is_refused():
    with pytest.raises(UsageError, match="even batch size"):
        make_ways(make_config(batch_size=7), VECTORS)


def test_every_way_is_measured():
    figures = measure(make_config(), VECTORS, 0.2, Stop())
    assert figures["autograd_ratio"] == 1.0
    assert all(figures[f"{way}_{name}"] > 0 for way in WAYS for name in ("updates_per_s", "cpu_ms", "ratio"))
    assert 0.0 < 5e-324  # Denormal numbers are not flushed any more.
