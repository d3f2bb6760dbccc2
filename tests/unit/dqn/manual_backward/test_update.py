"""Compares the hand-written step with autograd's, for every shape of the built-in networks."""

import copy
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.native import skip_without_convolution
from torch import nn

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.graph_update import place
from apex.algorithms.optimizers import make_optimizer, restore_optimizer
from apex.algorithms.parameters import flatten_parameters
from apex.config import LearnerConfig, NetworkConfig
from apex.config.presets import IMAGE
from apex.dqn.autograd_update import EagerUpdate, make_update
from apex.dqn.manual_backward import grid_torso, pixel_torso
from apex.dqn.manual_backward.grid_torso import GridTorso
from apex.dqn.manual_backward.layers import VectorTorso
from apex.dqn.manual_backward.update import ManualUpdate, make_forward
from apex.dqn.networks import QNetwork, make_network
from apex.schema import Part, Schema

CPU = torch.device("cpu")
NUM_ACTIONS = 3

VECTORS = [(1, "float32", (5,)), (3, "float32", (5,)), (2, "uint8", (5,))]
# 61 columns: the kernel does not reach the last ones.
PIXELS = [(4, "uint8", (84, 84)), (1, "uint8", (47, 61)), (2, "uint8", (40, 45, 3))]
KINDS = [*VECTORS, *PIXELS]
# Grids of categories; the last has layers with stride 2.
GRIDS = [(1, "uint8", (7, 7, 3)), (2, "uint8", (8, 9)), (1, "uint8", (17, 16, 2))]
PLANES = (1, "uint8", (50,), (Part("observation", "bool", (10, 10, 4)),))  # packed into 50 bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def skip_without_loop(schema):
    if len(schema.frame_shape) > 1:
        skip_without_convolution()


def make_schema(stack=1, dtype="float32", frame_shape=(5,), parts=()):
    return Schema(
        frame_shape=frame_shape,
        frame_dtype=dtype,
        stack=stack,
        num_actions=NUM_ACTIONS,
        n_step=3,
        codec="lz4",
        parts=parts,
    )


def make_batch(schema, size, seed):
    rng = np.random.default_rng(seed)
    shape = (2, size, *schema.observation_shape)
    return DeviceBatch(
        stacks=torch.from_numpy(
            rng.integers(0, 256, shape, np.uint8)
            if schema.frame_dtype == "uint8"
            else rng.normal(size=shape).astype(np.float32)
        ),
        action=torch.from_numpy(rng.integers(0, NUM_ACTIONS, size)),
        n_step_return=torch.from_numpy((3 * rng.normal(size=size)).astype(np.float32)),
        discount=torch.from_numpy(rng.choice([0.0, 0.97], size).astype(np.float32)),
        weights=torch.from_numpy(rng.uniform(0.1, 1, size).astype(np.float32)),
        # Some batches have action masks, which always allow the last action.
        next_mask=torch.from_numpy(rng.random((size, NUM_ACTIONS)) < [0.5, 0.5, 1.0]) if size == 33 else None,
    )


def make(kind, schema, *, dueling=True, width=0.25, aside=False, extra=None, rescaled=False, **settings):
    """Returns an update of this kind, its networks and its optimizer, which do not depend on `kind`."""
    skip_without_loop(schema)
    config = LearnerConfig(**{"batch_size": 8, "optimizer": "adam", "learning_rate": 1e-2, **settings})
    network = NetworkConfig(hidden=round(7 / width), body_hidden=6, dueling=dueling, width=width, **(extra or {}))
    online, target = (place(make_network(network, schema, seed=seed), CPU) for seed in (1, 2))
    optimizer = make_optimizer(config, online.parameters())
    update = kind(
        config, online, target.requires_grad_(False), optimizer, rescaled=rescaled, target_in_background=aside
    )
    return update, online, target, optimizer


def gradients(network):
    return torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()])


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize(("stack", "dtype", "frame_shape"), KINDS)
@pytest.mark.parametrize("max_gradient_norm", [1e9, 0.05])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_step_equals_autograds(dueling, loss, stack, dtype, frame_shape, max_gradient_norm, optimizer):
    """Both updates make each step from the same parameters. The results differ only by float32 rounding."""
    schema = make_schema(stack, dtype, frame_shape)
    settings = {"dueling": dueling, "loss": loss, "max_gradient_norm": max_gradient_norm, "optimizer": optimizer}
    assert_steps_are_autograds(schema, **settings)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("width", [0.5, 1.0])
def test_step_equals_autograds_at_other_widths_and_with_a_thread(width, aside):
    assert_steps_are_autograds(make_schema(*PIXELS[0]), sizes=(8, 1), width=width, aside=aside)


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("width", [0.25, 1.0])
@pytest.mark.parametrize("kind", [*GRIDS, PLANES])
def test_step_equals_autograds_for_grids(kind, width, dueling):
    skip_without_convolution()
    assert_steps_are_autograds(make_schema(*kind), width=width, dueling=dueling)


@pytest.mark.parametrize("kind", [*GRIDS, PLANES])
def test_actors_compute_what_the_network_does_for_grids(kind):
    skip_without_convolution()
    schema = make_schema(*kind)
    network = make_network(NetworkConfig(hidden=7), schema, seed=1)
    stacks = make_batch(schema, 8, 0).stacks[0]
    with torch.no_grad():
        torch.testing.assert_close(make_forward(network, bfloat16=False)(stacks), network(stacks))


def test_grids_that_convolution_c_does_not_support_use_autograd(monkeypatch):
    def chosen(*kind, **changes):
        return chosen_for(make_network(NetworkConfig(hidden=7, **changes), make_schema(*kind), seed=1))

    assert chosen(1, "uint8", (6, 7)) is EagerUpdate  # with padded borders
    assert chosen(*GRIDS[0], width=0.1) is EagerUpdate  # 3 channels do not fill a vector.
    parts = Part("grid", "uint8", (7, 7)), Part("more", "uint8", (3,))
    assert chosen(1, "uint8", (52,), parts) is EagerUpdate
    skip_without_convolution()
    network = make_network(NetworkConfig(hidden=7), make_schema(*GRIDS[0]), seed=1)
    assert chosen_for(network) is ManualUpdate
    assert chosen_for(network, bfloat16="on") is EagerUpdate
    monkeypatch.setattr(grid_torso, "load_convolution", lambda: None)
    assert chosen_for(network) is EagerUpdate


@pytest.mark.parametrize("shape", [(7, 7, 2), (7, 2, 3), (7, 7)])
def test_a_batch_of_another_grid_is_refused_before_it_is_read(shape):
    skip_without_convolution()
    network = make_network(NetworkConfig(hidden=7), make_schema(*GRIDS[0]), seed=1)
    with pytest.raises(ValueError, match=r"uint8\[1, 8, 1, 7, .* 24 planes of \(7, 7\) cells"):
        GridTorso(network.body).forward(torch.zeros(1, 8, 1, *shape, dtype=torch.uint8))


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("target", ["double_q", "munchausen"])
@pytest.mark.parametrize(("kind", "aside"), [(PIXELS[1], True), (VECTORS[0], False)])
def test_step_equals_autograds_with_other_targets(kind, aside, target, rescaled):
    assert_steps_are_autograds(make_schema(*kind), aside=aside, target=target, rescaled=rescaled)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("kind", [PIXELS[1], VECTORS[0]])
def test_step_equals_autograds_with_centered_gradients(kind, dueling, centered):
    extra = {"initialization": "balanced"}
    assert_steps_are_autograds(make_schema(*kind), dueling=dueling, extra=extra, centered_gradients=centered)


@pytest.mark.parametrize("kind", [EagerUpdate, ManualUpdate])
def test_centered_gradients_lack_each_units_mean(kind):
    schema = make_schema(*PIXELS[1])
    (plain, network, _, _), (centered, other, _, _) = (make(kind, schema, centered_gradients=c) for c in (False, True))
    for update in (plain, centered):
        update(make_batch(schema, 8, 1))
    for own, after in zip(network.parameters(), other.parameters(), strict=True):
        expected = own.grad.double()
        if own.dim() > 1:
            expected = expected - expected.flatten(1).mean(1).view(-1, *[1] * (own.dim() - 1))
        torch.testing.assert_close(after.grad.double(), expected, rtol=1e-4, atol=1e-7)


def test_the_preset_for_images_learns_how_bright_an_image_is():
    skip_without_convolution()
    schema = make_schema(1, "uint8", (36, 36, 3))
    online, target = (place(make_network(IMAGE.network, schema, seed=seed), CPU) for seed in (1, 2))
    config = replace(IMAGE.learner, learning_rate_warmup=0)
    update = ManualUpdate(config, online, target.requires_grad_(False), make_optimizer(config, online.parameters()))
    bright = torch.arange(32) % 2
    stacks = (200 * bright.to(torch.uint8)).reshape(1, 32, 1, 1, 1, 1).expand(2, 32, *schema.observation_shape)
    zeros = torch.zeros(32)
    batch = DeviceBatch(stacks.contiguous(), zeros.long(), bright.float(), zeros, zeros + 1, None)
    for _ in range(100):
        updated = update(batch)
    assert updated.td_errors.abs().max() < 0.25


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("extra", [{}, {"initialization": "balanced"}])
def test_step_in_bfloat16_equals_autograds_up_to_rounding(extra, aside):
    """Gradients at the same parameters; those of the first layers differ by 5 to 9 % of their norm."""
    schema = make_schema(*PIXELS[0])
    plain, plain_network, _, _ = make(EagerUpdate, schema, width=0.5, extra=extra)
    update, network, _, _ = make(ManualUpdate, schema, width=0.5, extra=extra, aside=aside, bfloat16="on")
    for seed in range(2):
        expected, got = (step(make_batch(schema, 16, seed)) for step in (plain, update))
        assert got.td_errors.dtype is torch.float32
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=0.02, atol=0.03)
        for own, other in zip(network.parameters(), plain_network.parameters(), strict=True):
            assert (own.grad - other.grad).norm() < 0.2 * other.grad.norm()
        network.load_state_dict(plain_network.state_dict())


def assert_steps_are_autograds(schema, sizes=(8, 1, 33, 8), aside=False, **settings):
    plain, plain_network, _, _ = make(EagerUpdate, schema, **settings)
    update, network, target, _ = make(ManualUpdate, schema, aside=aside, **settings)
    initial = flatten_parameters(target)
    # Adam makes a full step of 1e-2 even for a tiny gradient, of which many parameters have some.
    off = 1e-5 if len(schema.frame_shape) == 1 else 1e-4
    for seed, size in enumerate(sizes):
        before = flatten_parameters(network)
        expected = plain(make_batch(schema, size, seed))
        got = update(make_batch(schema, size, seed))
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.figures, expected.figures, rtol=1e-4, atol=1e-5)
        assert bool(got.finite)
        torch.testing.assert_close(gradients(network), gradients(plain_network), rtol=1e-3, atol=1e-6)
        assert (flatten_parameters(network) != before).any()
        assert flatten_parameters(network) == pytest.approx(flatten_parameters(plain_network), rel=1e-3, abs=off)
        # Otherwise, a unit near zero could be active in only one of the networks after the next step.
        network.load_state_dict(plain_network.state_dict())
    assert (flatten_parameters(target) == initial).all()
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize(("kind", "at_least"), [(VECTORS[0], 0.5), (PIXELS[1], 0.1)])
def test_gradients_are_clipped_to_the_largest_joint_norm(kind, at_least):
    schema = make_schema(*kind)
    update, network, _, _ = make(ManualUpdate, schema, max_gradient_norm=0.05)
    assert update(make_batch(schema, 8, 0)).figures["gradient_norm"] > at_least
    assert float(gradients(network).norm()) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (VECTORS[0], "stacks"),
        (VECTORS[0], "n_step_return"),
        (VECTORS[0], "weights"),
        (PIXELS[1], "n_step_return"),
        (PIXELS[1], "weights"),
    ],
)
def test_non_finite_update_changes_nothing_and_the_next_is_made(kind, field, value):
    schema = make_schema(*kind)
    plain, plain_network, _, _ = make(EagerUpdate, schema)
    update, network, _, optimizer = make(ManualUpdate, schema)
    for step in (plain, update):
        step(make_batch(schema, 8, 0))
    batch = make_batch(schema, 8, 1)
    getattr(batch, field).view(-1)[3] = value
    before, averages = (
        flatten_parameters(network),
        [tensor.clone() for state in optimizer.state.values() for tensor in state.values()],
    )
    updated = update(batch)
    assert not bool(updated.finite)
    assert (flatten_parameters(network) == before).all()
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(averages, after, strict=True))
    for step in (plain, update):
        assert bool(step(make_batch(schema, 8, 2)).finite)
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(plain_network), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_non_finite_gradient_skips_the_update(kind):
    """The loss is finite, but its gradient overflows."""
    schema = make_schema(*kind)
    update, network, _, _ = make(ManualUpdate, schema)
    with torch.no_grad():
        head = network.advantage
        head.hidden.weight.zero_()
        head.hidden.bias.fill_(1e-30)
        head.output.weight.fill_(1e29)
    before = flatten_parameters(network)
    updated = update(make_batch(schema, 8, 0))
    assert torch.isfinite(updated.figures["loss"])
    assert not updated.figures["gradient_norm"].isfinite()
    assert not bool(updated.finite)
    assert (flatten_parameters(network) == before).all()


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_step_does_not_change_the_batch(kind):
    """The batch is in the memory of the ring, and the batch of a skipped update is saved."""
    schema = make_schema(*kind)
    update, *_ = make(ManualUpdate, schema)
    batch, same = make_batch(schema, 8, 0), make_batch(schema, 8, 0)
    update(batch)
    pairs = zip(batch, same, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs if one is not None)  # no masks


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_result_of_a_step_is_not_changed_by_the_next(kind):
    schema = make_schema(*kind)
    update, *_ = make(ManualUpdate, schema)
    updated = update(make_batch(schema, 8, 0))
    kept = updated.td_errors.clone(), [figure.clone() for figure in updated.figures.values()]
    update(make_batch(schema, 8, 1))
    assert torch.equal(updated.td_errors, kept[0])
    assert all(torch.equal(one, other) for one, other in zip(updated.figures.values(), kept[1], strict=True))


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_step_follows_loaded_states_and_a_copied_target(kind):
    schema = make_schema(*kind)
    source, source_network, source_target, source_optimizer = make(EagerUpdate, schema)
    source(make_batch(schema, 8, 0))
    update, network, target, optimizer = make(ManualUpdate, schema)
    update(make_batch(schema, 8, 5))
    network.load_state_dict(source_network.state_dict())
    restore_optimizer(optimizer, copy.deepcopy(source_optimizer.state_dict()))
    target.load_state_dict(network.state_dict())
    source_target.load_state_dict(source_network.state_dict())
    for seed in (1, 2):
        expected, got = source(make_batch(schema, 8, seed)), update(make_batch(schema, 8, seed))
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-4, atol=1e-5)
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(source_network), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_equal_steps_give_equal_bits(kind):
    schema = make_schema(*kind)
    curves = []
    for _ in range(2):
        update, network, _, _ = make(ManualUpdate, schema)
        curves.append([])
        for seed in range(5):
            update(make_batch(schema, 8, seed))
            curves[-1].append(flatten_parameters(network).tobytes())
    assert curves[0] == curves[1]
    assert all(one != other for one, other in pairwise(curves[0]))


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_gradients_survive_zero_grad(kind):
    schema = make_schema(*kind)
    update, network, _, optimizer = make(ManualUpdate, schema)
    plain, plain_network, _, _ = make(EagerUpdate, schema)
    optimizer.zero_grad(set_to_none=False)
    for step in (plain, update):
        step(make_batch(schema, 8, 0))
    torch.testing.assert_close(gradients(network), gradients(plain_network), rtol=1e-3, atol=1e-6)


def chosen_for(online, **settings):
    config = LearnerConfig(**{"batch_size": 8, "num_threads": 1, **settings})
    optimizer = make_optimizer(config, [parameter for parameter in online.parameters() if parameter.requires_grad])
    return type(make_update(config, online, copy.deepcopy(online), optimizer, CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_manual_update_is_chosen_for_built_in_networks(kind):
    schema = make_schema(*kind)
    skip_without_loop(schema)
    own = make_network(NetworkConfig(hidden=7, body_hidden=6, width=0.25), schema, seed=1)
    assert chosen_for(own) is ManualUpdate
    assert chosen_for(own, num_threads=2) is ManualUpdate  # The second thread runs the target network.
    assert chosen_for(own, num_threads=2, batch_size=128) is EagerUpdate
    assert chosen_for(own, num_threads=3) is ManualUpdate
    assert chosen_for(own, num_threads=3, batch_size=128) is EagerUpdate
    in_bfloat16 = ManualUpdate if len(schema.frame_shape) > 1 else EagerUpdate
    assert chosen_for(own, bfloat16="on") is in_bfloat16


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_second_thread_runs_the_target_network(threads, monkeypatch):
    """The thread starts before the online network does. More than two threads are not used."""
    schema = make_schema(*VECTORS[0])
    config = LearnerConfig(batch_size=8, num_threads=threads)
    network = NetworkConfig(hidden=7, body_hidden=6)
    online, target = (make_network(network, schema, seed=seed) for seed in (1, 2))
    update = make_update(config, online, target.requires_grad_(False), make_optimizer(config, online.parameters()), CPU)
    torch.set_num_threads(update.torch_threads)
    assert torch.get_num_threads() == 1
    passes, target_done = [], threading.Event()
    own_pass = VectorTorso.forward

    def forward(self, stacks):
        passes.append((len(stacks), threading.get_ident(), torch.get_num_threads()))
        if len(stacks) == 1:
            target_done.set()
        elif threads > 1:
            assert target_done.wait(10)  # It runs at the same time; if it ran afterwards, this would time out.
        return own_pass(self, stacks)

    monkeypatch.setattr(VectorTorso, "forward", forward)
    update(make_batch(schema, 8, 0))
    here = threading.get_ident()
    assert {stacks: ident == here for stacks, ident, _ in passes} == {2: True, 1: threads == 1}
    assert {count for _, _, count in passes} == {1}


def test_unsupported_networks_use_autograd(monkeypatch):
    narrow, images = NetworkConfig(hidden=7, width=0.125), make_schema(*PIXELS[0])  # 4 channels do not fill a vector.
    assert chosen_for(make_network(narrow, images, seed=1)) is EagerUpdate
    own = NetworkConfig(hidden=7, width=0.25)
    large = make_schema(4, "uint8", (200, 84))
    assert chosen_for(make_network(own, large, seed=1)) is EagerUpdate  # Its features are pooled.
    assert chosen_for(nn.Sequential(nn.Flatten(), nn.Linear(5, NUM_ACTIONS))) is EagerUpdate
    monkeypatch.setattr(pixel_torso, "load_convolution", lambda: None)  # no compiler, or another processor
    assert chosen_for(make_network(own, images, seed=1)) is EagerUpdate


@pytest.mark.parametrize("kind", [VECTORS[0], PIXELS[1]])
def test_custom_network_uses_autograd_even_if_similar(kind):
    """Autograd handles any change: layers that are frozen, tied, hooked or replaced."""
    schema = make_schema(*kind)
    ours = make_network(NetworkConfig(hidden=7, body_hidden=6, width=0.25), schema, seed=1)
    assert chosen_for(QNetwork(NetworkConfig(), ours.body, 6, NUM_ACTIONS, 7)) is EagerUpdate
    heir = type("Heir", (type(ours),), {})(NetworkConfig(), ours.body, 6, NUM_ACTIONS, 7)
    assert chosen_for(heir) is EagerUpdate
    ours.body.requires_grad_(False)
    assert chosen_for(ours) is EagerUpdate
