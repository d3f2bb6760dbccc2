"""Compares a step with the paper's formula, in both number formats, and as a CUDA graph with the plain step."""

import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apex.algorithms.gradient_step import DeviceBatch, Updated
from apex.algorithms.graph_update import WARM_UP_STEPS, GpuSwitches, GraphUpdate, place
from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apex.algorithms.optimizers import clip_gradients, make_optimizer, step_if
from apex.algorithms.parameters import flatten_parameters
from apex.config import LearnerConfig, NetworkConfig
from apex.dqn import autograd_update
from apex.dqn.autograd_update import EagerUpdate, make_update
from apex.dqn.networks import QNetwork, make_network
from apex.schema import Schema

PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
CPU = torch.device("cpu")
B = 8


@pytest.fixture(autouse=True)
def without_manual_backward(monkeypatch):
    """Uses autograd for all networks; manual_backward/test_update.py compares both."""
    monkeypatch.setattr(autograd_update, "has_manual_backward", lambda network, bfloat16: False)


pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return DeviceBatch(
        stacks=torch.from_numpy(rng.integers(0, 256, (2, B, 4, 84, 84), np.uint8)),
        action=torch.from_numpy(rng.integers(0, 6, B)),
        n_step_return=torch.from_numpy(rng.normal(size=B).astype(np.float32)),
        discount=torch.full((B,), 0.97),
        weights=torch.from_numpy(rng.uniform(0.1, 1, B).astype(np.float32)),
    )


def cut(batch, size):
    return DeviceBatch(batch.stacks[:, :size], *(row[:size] for row in batch.tensors[1:]))


class Busy(nn.Linear):
    """Refuses calls from two threads at once, as a module that keeps values on itself would need."""

    def __init__(self):
        super().__init__(4 * 84 * 84, 6)
        self.is_busy = False

    def forward(self, x):
        assert not self.is_busy
        self.is_busy = True
        time.sleep(0.05)
        self.is_busy = False
        return super().forward(x.flatten(1).float())


def test_no_module_of_a_custom_network_runs_on_two_threads():
    online, target = Busy(), Busy().requires_grad_(False)
    config = LearnerConfig(batch_size=B, optimizer="adam")
    step = EagerUpdate(config, online, target, make_optimizer(config, online.parameters()), num_parts=2)
    assert step(make_batch()).finite


def make_step(**settings):
    config = LearnerConfig(**{"batch_size": B, "max_gradient_norm": 1e9, **settings})
    online, target = (make_network(NetworkConfig(width=0.25, hidden=64), PIXELS, seed=seed) for seed in (1, 2))
    optimizer = make_optimizer(config, online.parameters())
    return make_update(config, online, target.requires_grad_(False), optimizer, CPU), online, target


def gradient(network):
    return torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()]).double()


def test_bfloat16_agrees_with_float32_up_to_rounding():
    """Within 2 % of the loss, 2 % of each TD error's scale, and 3 degrees of the gradient's direction."""
    plain, plain_network, _ = make_step()
    fast, fast_network, _ = make_step(bfloat16="on")
    batch = make_batch()
    expected, got = plain(batch), fast(batch)
    torch.testing.assert_close(got.figures["loss"], expected.figures["loss"], rtol=0.02, atol=0)
    torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=0.02, atol=0.02)
    wanted, found = gradient(plain_network), gradient(fast_network)
    assert torch.cosine_similarity(wanted, found, dim=0) > np.cos(np.radians(3))
    torch.testing.assert_close(found.norm(), wanted.norm(), rtol=0.02, atol=0)


def test_gradient_is_that_of_the_weighted_loss_through_s():
    """Compares with the formula, evaluated for one transition after the other."""
    update, online, target = make_step()
    batch = make_batch()
    twin = make_network(NetworkConfig(width=0.25, hidden=64), PIXELS, seed=1)
    total = torch.zeros(())
    for row in range(B):
        s, following = batch.stacks[0, row : row + 1], batch.stacks[1, row : row + 1]
        with torch.no_grad():
            best = int(twin(following)[0].argmax())
            wanted = batch.n_step_return[row] + batch.discount[row] * target(following)[0, best]
        delta = wanted - twin(s)[0, batch.action[row]]
        total = total + batch.weights[row] * 0.5 * delta**2 / B
    total.backward()
    updated = update(batch)
    torch.testing.assert_close(updated.figures["loss"], total.detach(), rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient(online), gradient(twin), rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_one_pass_of_both_states_gives_the_same_step(optimizer):
    """Equal up to float32 rounding: with twice as many rows, a convolution may add in another order."""
    plain, plain_network, target = make_step(optimizer=optimizer)
    one, one_network, _ = make_step(optimizer=optimizer)
    one._one_pass = True
    passes = []
    one_network.register_forward_hook(lambda network, inputs, output: passes.append(len(output)))
    for seed in range(2):
        batch = make_batch(seed)
        expected, got = plain(batch), one(batch)
        torch.testing.assert_close(got.figures["loss"], expected.figures["loss"], rtol=1e-4, atol=0)
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.figures["mean_q"], expected.figures["mean_q"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient(one_network), gradient(plain_network), rtol=1e-3, atol=1e-6)
    assert passes == [2 * B] * 2
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("switch", ["one pass", "scaled weights"])
def test_switches_change_errors_and_gradients_by_rounding_only(switch):
    plain, plain_network, _ = make_step()
    switched, network, target = make_step()
    if switch == "one pass":
        switched._one_pass = True
    else:
        for module in (*network.modules(), *target.modules()):
            module.scales_weights = True  # Only a `PixelConvolution` reads it.
    batch = make_batch()
    expected, got = plain(batch), switched(batch)
    for one, other in ((got.td_errors, expected.td_errors), (gradient(network), gradient(plain_network))):
        assert float((one - other).norm() / other.norm()) <= 1e-5


def test_halves_on_two_threads_give_the_same_step(monkeypatch):
    """Equal up to float32 rounding in each step, also for an odd batch and for a single row."""
    settings = {"optimizer": "adam", "loss": "huber", "max_gradient_norm": 1.0}
    plain, plain_network, _ = make_step(**settings)
    halves, network, target = make_step(**settings, num_threads=2, batch_size=128)
    passes, whole = [], make_batch(3)
    own_pass = QNetwork.forward
    monkeypatch.setattr(
        QNetwork, "forward", lambda self, x: passes.append((threading.get_ident(), len(x))) or own_pass(self, x)
    )
    for batch in (make_batch(0), make_batch(1), cut(whole, 7), cut(whole, 1), make_batch(2)):
        expected = plain(batch)
        passes.clear()
        got = halves(batch)
        size = len(batch.action)
        assert sorted(rows for _, rows in passes) == sorted(3 * [size // 2, size - size // 2] if size > 1 else 3 * [1])
        assert len({thread for thread, _ in passes}) == min(2, size)
        torch.testing.assert_close(got.figures, expected.figures, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(gradient(network), gradient(plain_network), rtol=1e-2, atol=1e-5)
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(plain_network), rel=1e-2, abs=1e-4)
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("bfloat16", ["off", "on"])
def test_target_in_background_gives_the_same_bits(monkeypatch, bfloat16):
    plain, plain_network, _ = make_step(optimizer="adam", bfloat16=bfloat16)
    aside, network, target = make_step(optimizer="adam", bfloat16=bfloat16, num_threads=2, batch_size=B)
    threads = []
    own_pass = QNetwork.forward
    monkeypatch.setattr(
        QNetwork, "forward", lambda self, x: threads.append((self, threading.get_ident())) or own_pass(self, x)
    )
    for seed in range(3):
        expected = plain(make_batch(seed))
        threads.clear()
        got = aside(make_batch(seed))
        assert len({thread for module, thread in threads if module is network}) == 1
        assert len({thread for _, thread in threads}) == 2
        assert torch.equal(got.td_errors, expected.td_errors)
        assert torch.equal(gradient(network), gradient(plain_network))
    assert all(parameter.grad is None for parameter in target.parameters())


def test_non_finite_half_skips_the_update():
    halves, network, _ = make_step(num_threads=2, batch_size=128)
    before = flatten_parameters(network)
    batch = make_batch()
    batch.n_step_return[-1] = float("nan")
    assert not halves(batch).finite
    assert (flatten_parameters(network) == before).all()


class Unused(nn.Module):
    """Has one layer that computes the values, and one that no pass uses."""

    def __init__(self):
        super().__init__()
        self.values, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, observation):
        return self.values(observation.flatten(1))


def test_unused_parameter_gets_no_gradient_from_halves():
    network, target = Unused(), Unused().requires_grad_(False)
    config = LearnerConfig(num_threads=2, batch_size=128)
    update = make_update(config, network, target, torch.optim.SGD(network.parameters(), 0.1), CPU)
    before = network.idle.weight.clone()
    row = torch.ones(4)
    assert update(DeviceBatch(torch.ones(2, 4, 1, 2), row.long(), row, row, row)).finite
    assert network.idle.weight.grad is None
    assert torch.equal(network.idle.weight, before)
    assert network.values.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("num_threads", "batch_size", "buffers", "parts", "aside", "shared_by"),
    [
        (0, 512, 0, 1, False, 1),
        (1, 512, 0, 1, False, 1),
        (2, 512, 0, 2, False, 1),
        (2, 128, 0, 2, False, 1),
        (2, 127, 0, 1, True, 1),
        (2, 512, 1, 1, False, 2),
        (3, 512, 0, 1, False, 3),
    ],
)
def test_update_uses_threads_by_batch_size_and_buffers(num_threads, batch_size, buffers, parts, aside, shared_by):
    network = nn.Linear(1, 1)
    for index in range(buffers):
        network.register_buffer(f"buffer{index}", torch.zeros(1))
    before = torch.get_num_threads()
    config = LearnerConfig(num_threads=num_threads, batch_size=batch_size)
    update = make_update(config, network, network, torch.optim.SGD(network.parameters()), CPU)
    assert (len(update._networks), update._target_forwards[0].in_background, update.torch_threads) == (
        parts,
        aside,
        shared_by,
    )
    assert torch.get_num_threads() == before  # The process sets it.


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_graph_and_one_pass_are_used_on_gpus_only(device):
    network = nn.Linear(1, 1)
    config = LearnerConfig(batch_size=B)
    step = make_update(config, network, network, torch.optim.SGD(network.parameters()), torch.device(device))
    assert type(step) is {"cpu": EagerUpdate, "cuda": GraphUpdate}[device]
    assert getattr(step, "_update", step)._one_pass == (device == "cuda")


@pytest.mark.parametrize("switch", [False, True])
def test_switches_choose_passes_and_graphs_on_a_gpu(switch):
    network, switches = nn.Linear(1, 1), GpuSwitches(two_passes=switch, graph_per_buffer=not switch)
    parts = LearnerConfig(batch_size=B), network, network, torch.optim.SGD(network.parameters())
    step = make_update(*parts, torch.device("cuda"), switches=switches)
    assert (step._update._one_pass, step._per_buffer) == (not switch, not switch)
    assert not make_update(*parts, CPU, switches=switches)._one_pass


@pytest.mark.parametrize(("device", "cached"), [("cpu", True), ("cuda", False)])
def test_autocast_caches_weights_on_a_cpu_only(monkeypatch, device, cached):
    calls = []

    class Autocast:
        def __init__(self, *arguments, **settings):
            calls.append((arguments, settings))

        def __enter__(self):
            raise InterruptedError

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch, "autocast", Autocast)
    step, _, _ = make_step(bfloat16="on")
    stacks = SimpleNamespace(device=torch.device(device))
    with pytest.raises(InterruptedError):
        step(make_batch()._replace(stacks=stacks))
    assert calls == [((device, torch.bfloat16), {"cache_enabled": cached})]


def test_figures_equal_their_definition():
    step, online, _ = make_step()
    batch = make_batch()
    with torch.no_grad():
        q = online(batch.stacks[0])
    updated = step(batch)
    figures = updated.figures
    torch.testing.assert_close(figures["td_error"], updated.td_errors.mean())
    torch.testing.assert_close(figures["mean_q"], q.max(1).values.mean())
    torch.testing.assert_close(figures["loss"], (batch.weights * updated.td_errors**2 / 2).mean())
    torch.testing.assert_close(figures["gradient_norm"].double(), gradient(online).norm(), rtol=1e-4, atol=0)


class Video(nn.Sequential):
    """A network with a convolution over time. `to` changes only the memory format, as there is no GPU."""

    def to(self, device, memory_format=torch.preserve_format):
        assert device.type == "cuda"
        return super().to(memory_format=memory_format)


def test_only_image_weights_get_channels_last_on_a_gpu():
    video = place(Video(nn.Conv3d(1, 2, 3), nn.Conv2d(2, 3, 3), nn.Linear(4, 5)), torch.device("cuda"))
    volume, image, line = (layer.weight for layer in video)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert volume.is_contiguous()
    assert line.is_contiguous()
    network = nn.Linear(4, 5)
    assert place(network, CPU) is network


@pytest.mark.parametrize("switch", [False, True])
def test_the_first_layer_scales_weights_only_if_switched_on_a_gpu(switch):
    switches = GpuSwitches(scaled_weights=switch)
    network = place(Video(PixelConvolution(4, 8, 8, 4), nn.Conv2d(8, 4, 3)), torch.device("cuda"), switches)
    assert network[0].scales_weights is switch
    assert place(PixelConvolution(4, 8, 8, 4), CPU, switches).scales_weights is False


# --- CUDA graphs, with a fake that records and replays ----------------------------------------------------------------


class Recorder:
    """An update that adds the batch's first weight to a sum when it runs or is replayed, not when it is captured."""

    torch_threads = 1

    def __init__(self):
        self.calls, self.total = 0, torch.zeros(())
        self.tape = None  # of the graph that is captured now

    def __call__(self, batch):
        self.calls += 1
        result = Updated(torch.zeros(B), torch.tensor(True), {})

        def run():
            self.total += batch.weights[0]
            result.td_errors.copy_(batch.weights)

        if self.tape is not None:
            self.tape.append(run)
        else:
            run()
        return result


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()

    class Graph:
        def __init__(self):
            self.tape = []

        def replay(self):
            for run in self.tape:
                run()

    @contextmanager
    def record(graph, stream, capture_error_mode):
        recorder.tape = graph.tape
        try:
            yield
        finally:
            recorder.tape = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "not the default")
    return recorder


def test_graph_learns_from_every_batch_once(recorder):
    step = GraphUpdate(recorder)
    assert (step.ready, step.recorded) == (False, False)
    for number in range(1, 11):
        batch = make_batch()._replace(weights=torch.full((B,), float(number)))
        updated = step(batch)
        batch.weights.fill_(1e9)  # The next batch overwrites the buffer.
        assert float(updated.td_errors[0]) == number
        assert float(recorder.total) == number * (number + 1) / 2
    assert recorder.calls == WARM_UP_STEPS + 1
    assert (step.ready, step.recorded) == (True, True)


def test_graphs_read_each_buffer_in_place(recorder):
    step, buffers, ready = GraphUpdate(recorder, per_buffer=True), (make_batch(), make_batch()), []
    for number in range(1, 11):
        batch = buffers[number % 2]
        batch.weights.fill_(float(number))
        assert float(step(batch).td_errors[0]) == number
        assert float(recorder.total) == number * (number + 1) / 2
        ready.append(step.ready)
    assert recorder.calls == WARM_UP_STEPS + 2
    assert ready == [False] * 4 + [True] * 6


class Delayed(Recorder):
    """An update that does something else in every second step, as DPG's; `fails`: in these steps, a capture fails."""

    def __init__(self, recorder, fails=()):
        super().__init__()
        self.recorder, self.fails, self.count, self.done = recorder, fails, 0, []

    def __call__(self, batch):
        kind = self.count % 2
        if self.recorder.tape is not None and kind in self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.count += 1
        if self.recorder.tape is None:
            self.done.append(kind)
        else:
            self.recorder.tape.append(lambda: self.done.append(kind))
        return self.recorder(batch)


@pytest.mark.parametrize("fails", [(), (0,), (1,)])
def test_steps_keep_their_order_with_a_graph_for_each_kind(recorder, fails):
    update = Delayed(recorder, fails)
    step = GraphUpdate(update, cycle=2)
    for number in range(1, 11):
        batch = make_batch()._replace(weights=torch.full((B,), float(number)))
        assert float(step(batch).td_errors[0]) == number
    assert update.done == [0, 1] * 5
    assert float(recorder.total) == 55
    assert (step.ready, step.recorded) == (True, not fails)
    assert update.count == (10 if fails else WARM_UP_STEPS + 2)


def test_graph_needs_the_threads_of_its_update():
    step, _, _ = make_step(num_threads=2)
    assert GraphUpdate(step).torch_threads == step.torch_threads


def test_step_that_cannot_be_captured_runs_normally(recorder, caplog):
    """CUDA drops the capture of a network that waits for the GPU."""

    class Waiting(Recorder):
        def __call__(self, batch):
            if recorder.tape is not None:
                recorder.calls += 1
                raise torch.AcceleratorError("operation not permitted when stream is capturing\nand more")
            return recorder(batch)

    step = GraphUpdate(Waiting())
    for number in range(1, 11):
        updated = step(make_batch()._replace(weights=torch.full((B,), float(number))))
        assert float(updated.td_errors[0]) == number
        assert float(recorder.total) == number * (number + 1) / 2
    assert recorder.calls == 10 + 1
    (record,) = caplog.records
    assert "(operation not permitted when stream is capturing)" in record.message


def test_error_before_the_capture_is_raised(recorder):
    class Failing(Recorder):
        def __call__(self, batch):
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        GraphUpdate(Failing())(make_batch())


# --- skipped updates --------------------------------------------------------------------------------------------------


def contents(step, online):
    averages = [value for state in step._optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*online.parameters(), *averages)]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
def test_non_finite_update_changes_nothing(optimizer, spoil):
    step, online, _ = make_step(optimizer=optimizer)
    good = make_batch()
    assert step(good).finite
    before = contents(step, online)
    bad = good._replace(n_step_return=good.n_step_return.clone().fill_(spoil))
    assert not step(bad).finite
    assert all(map(torch.equal, before, contents(step, online)))
    assert step(good).finite


class Backward(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


def test_non_finite_gradient_skips_the_update():
    step, online, _ = make_step()
    online.register_forward_hook(lambda network, inputs, output: Backward.apply(output))
    before = contents(step, online)
    updated = step(make_batch())
    assert torch.isfinite(updated.figures["loss"])
    assert not updated.finite
    assert all(map(torch.equal, before, contents(step, online)))


def make_twins(optimizer):
    """Returns two equal networks, whose convolution is channels-last as on a GPU, and an optimizer for each."""
    networks = [nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2)) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    for network in networks:
        network[0].weight.data = network[0].weight.data.contiguous(memory_format=torch.channels_last)
    config = LearnerConfig(batch_size=B, optimizer=optimizer)
    return networks, [make_optimizer(config, network.parameters()) for network in networks]


def give_gradients(networks, value):
    for network in networks:
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_skipped_step_leaves_no_trace_even_if_first(optimizer, first, bad):
    """A skipped step does not influence later steps."""
    networks, (tried, plain) = make_twins(optimizer)
    if not first:
        give_gradients(networks, 0.5)
        step_if(torch.tensor(True), tried)
        plain.step()
    give_gradients(networks, bad)
    step_if(torch.tensor(False), tried)
    give_gradients(networks, 0.25)
    step_if(torch.tensor(True), tried)
    plain.step()
    for one, other in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(tried.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_optimizer_of_a_user_makes_no_step_that_is_skipped():
    """It may keep numbers on the CPU, which no operation of the GPU may change."""
    network = torch.nn.Linear(1, 1)
    before, optimizer = network.weight.item(), torch.optim.SGD(network.parameters(), lr=0.5)
    give_gradients([network], 1.0)
    step_if(torch.tensor(False), optimizer)
    assert network.weight.item() == before
    step_if(torch.tensor(True), optimizer)
    assert network.weight.item() == pytest.approx(before - 0.5)


class Operations(TorchDispatchMode):
    """Counts the operations of the device, without views. An operation on a list of tensors counts once."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("optimizer", "most"), [("adam", 2), ("rmsprop", 5)])
def test_skipping_a_step_costs_a_fixed_number_of_operations(optimizer, most):
    """Each operation is at least one kernel of the graph; one choice per tensor would be half of all kernels."""
    networks, (tried, plain) = make_twins(optimizer)
    give_gradients(networks, 0.5)
    counts = []
    for step in (partial(step_if, torch.tensor(True), tried), plain.step):
        step()
        with Operations() as operations:
            step()
        counts.append(operations.count)
    assert counts[0] - counts[1] <= most


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_gradients_equal_torchs(max_norm):
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2))] for _ in range(2))
    for own, other in zip(ours[:2], theirs[:2], strict=True):  # The last one has no gradient.
        own.grad = torch.randn_like(own)
        other.grad = own.grad.clone()
    norm = clip_gradients(ours, max_norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    for own, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(own.grad, other.grad)
    assert ours[2].grad is None
