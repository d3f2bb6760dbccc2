"""Compares the native convolution with the formula; torch computes what it does not support.

Outputs of the native convolution have the channels last in memory, torch's do not.
"""

import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
import torch
from support.native import skip_without_convolution
from torch import nn

from apex.algorithms.kernels import convolution
from apex.algorithms.kernels.convolution import find_convolution, load_convolution
from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apexreplay import native

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # sums of up to 1,200 products in float32


@pytest.fixture
def found():
    """Clears the cached library before and after a test."""
    load_convolution.cache_clear()
    yield
    load_convolution.cache_clear()


def make_layer(channels=4, outputs=8, *, kernel=8, stride=4, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return PixelConvolution(channels, outputs, kernel, stride, **settings)


def make_images(batch=3, channels=4, height=84, width=84, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (batch, channels, height, width), np.uint8))


def convolve_naively(layer, images):
    """Computes each output position in float64."""
    weight, bias, pixels = layer.weight.detach().double(), layer.bias.detach().double(), images.double() / 255
    rows, columns = ((size - 8) // 4 + 1 for size in images.shape[2:])
    out = torch.empty(len(images), len(weight), rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            patch = pixels[:, :, 4 * i : 4 * i + 8, 4 * j : 4 * j + 8]
            out[:, :, i, j] = torch.einsum("bcyx,ocyx->bo", patch, weight) + bias
    return out


def differentiate_naively(images, gradient):
    """Returns the gradients of weight and bias, summed over output positions in float64."""
    pixels, gradient = images.double() / 255, gradient.double()
    weight = torch.zeros(gradient.shape[1], images.shape[1], 8, 8, dtype=torch.float64)
    for i in range(gradient.shape[2]):
        for j in range(gradient.shape[3]):
            patch = pixels[:, :, 4 * i : 4 * i + 8, 4 * j : 4 * j + 8]
            weight += torch.einsum("bcyx,bo->ocyx", patch, gradient[:, :, i, j])
    return weight, gradient.sum((0, 2, 3))


def is_native(out):
    return out.permute(0, 2, 3, 1).is_contiguous()


SHAPES = [  # batch, channels, height, width, outputs
    (3, 4, 84, 84, 8),
    (2, 4, 84, 84, 32),
    (1, 1, 8, 8, 8),  # a single output position
    (2, 3, 11, 15, 16),  # unused pixels
    (5, 2, 47, 61, 24),  # two vectors of channels, then one; seven positions at once, or four or five
    (1, 16, 36, 52, 40),
]


@pytest.mark.parametrize(("batch", "channels", "height", "width", "outputs"), SHAPES)
def test_output_is_a_convolution_of_scaled_pixels(batch, channels, height, width, outputs):
    skip_without_convolution()
    layer, images = make_layer(channels, outputs), make_images(batch, channels, height, width)
    with torch.no_grad():
        out = layer(images)
    assert is_native(out)
    torch.testing.assert_close(out.double(), convolve_naively(layer, images), **TOLERANCE)


@pytest.mark.parametrize("columns", range(1, 24))
def test_rows_of_every_length_are_divided_into_blocks(columns):
    layer = make_layer(channels=1, outputs=24)  # blocks for two vectors of channels, and for one
    images = make_images(batch=1, channels=1, height=12, width=4 * columns + 4)
    torch.testing.assert_close(layer(images).double(), convolve_naively(layer, images), **TOLERANCE)


@pytest.mark.parametrize("order", ["channels first", "channels last"])
@pytest.mark.parametrize(("batch", "channels", "height", "width", "outputs"), SHAPES)
def test_gradients_equal_the_formula(batch, channels, height, width, outputs, order):
    skip_without_convolution()
    layer, images = make_layer(channels, outputs), make_images(batch, channels, height, width)
    out = layer(images)
    assert is_native(out)
    torch.testing.assert_close(out.double(), convolve_naively(layer, images), **TOLERANCE)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    if order == "channels last":
        gradient = gradient.to(memory_format=torch.channels_last)
    out.backward(gradient)
    weight, bias = differentiate_naively(images, gradient)
    torch.testing.assert_close(layer.weight.grad.double(), weight, **TOLERANCE)
    torch.testing.assert_close(layer.bias.grad.double(), bias, **TOLERANCE)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_scaled_weights_give_what_scaled_pixels_give(bfloat16):
    """In bfloat16, whole pixels are exact, so that scaled weights are at least as near to the formula."""
    images, outputs, gradients = make_images(), {}, {}
    for scales in (False, True):
        layer = make_layer()
        layer.scales_weights = scales
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            out = layer(images).float()
        out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape))
        outputs[scales], gradients[scales] = out.detach(), (layer.weight.grad, layer.bias.grad)
        assert not scales or out.is_contiguous(memory_format=torch.channels_last)
    exact = convolve_naively(layer, images)
    error = {scales: float((out.double() - exact).abs().max()) for scales, out in outputs.items()}
    assert error[True] < (0.02 if bfloat16 else 1e-5)
    assert error[True] <= 1.5 * error[False] + 1e-6
    most = 0.02 if bfloat16 else 1e-5
    for got, expected in zip(gradients[True], gradients[False], strict=True):
        assert float((got - expected).norm() / expected.norm()) < most


def test_gradients_add_up_over_several_calls():
    layer, twin = make_layer(), make_layer()
    images = [make_images(seed=seed) for seed in (1, 2)]
    for layer_or_twin, threads in ((layer, 1), (twin, 2)):  # With two threads, torch computes it.
        torch.set_num_threads(threads)
        for each in images:
            layer_or_twin(each).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)


def test_frozen_layer_and_empty_batch_are_supported():
    layer, images = make_layer().requires_grad_(False), make_images()
    out = layer(images)
    assert not out.requires_grad
    torch.testing.assert_close(out.double(), convolve_naively(layer, images), **TOLERANCE)
    assert layer(images[:0]).shape == (0, 8, 20, 20)


def test_images_may_have_any_memory_order():
    layer, images = make_layer(), make_images(6, 4, 84, 61)
    turned = images.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    assert not turned.is_contiguous()
    assert torch.equal(layer(turned), layer(images))
    assert torch.equal(layer(images[::2]), layer(images)[::2])


def test_images_are_not_changed():
    images = make_images()
    make_layer()(images).sum().backward()
    assert torch.equal(images, make_images())


UNFIT = {
    "floats": (make_layer, lambda images: images.float() / 255, 1),
    "more threads than one": (make_layer, lambda images: images, 2),
    "channels that fill no vector": (lambda: make_layer(outputs=12), lambda images: images, 1),
    "another kernel": (lambda: make_layer(kernel=6), lambda images: images, 1),
    "another stride": (lambda: make_layer(stride=2), lambda images: images, 1),
    "padding": (lambda: make_layer(padding=2), lambda images: images, 1),
    "dilation": (lambda: make_layer(dilation=2), lambda images: images, 1),
    "groups": (lambda: make_layer(groups=2), lambda images: images, 1),
    "no bias": (lambda: make_layer(bias=False), lambda images: images, 1),
    "one image without a batch": (make_layer, lambda images: images[0], 1),
}


@pytest.mark.parametrize(("make", "prepare", "threads"), UNFIT.values(), ids=UNFIT)
def test_unsupported_input_uses_torch(make, prepare, threads):
    torch.set_num_threads(threads)
    layer, images = make(), prepare(make_images())
    out = layer(images)
    bias = None if layer.bias is None else layer.bias.double()
    settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
    pixels = images.double() / (1 if images.is_floating_point() else 255)
    wanted = nn.functional.conv2d(pixels, layer.weight.double(), bias, *settings)
    torch.testing.assert_close(out.double(), wanted, **TOLERANCE)
    assert images.dim() == 3 or not is_native(out)


@pytest.mark.parametrize("shape", [(2, 4, 7, 84), (2, 4, 84, 5), (2, 4, 3, 3), (2, 3, 84, 84), (2, 5, 84, 84)])
def test_invalid_images_raise_torchs_error(shape):
    with pytest.raises(RuntimeError):
        make_layer()(torch.zeros(shape, dtype=torch.uint8))


def test_default_dtype_of_torch_has_no_effect():
    layer, images = make_layer(), make_images()
    expected = layer(images)
    expected.sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    torch.set_default_dtype(torch.float64)
    try:
        out = layer(images)
        out.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)
    assert torch.equal(layer.weight.grad, gradient)


def test_bias_gets_a_gradient_beside_a_frozen_weight():
    layer = make_layer()
    layer.weight.requires_grad_(False)
    layer(make_images()).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad.tolist() == [3 * 20 * 20] * 8


def test_second_derivative_is_refused():
    skip_without_convolution()
    layer = make_layer()
    (gradient,) = torch.autograd.grad(layer(make_images()).square().sum(), layer.weight, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_autocast_uses_torch():
    layer, images = make_layer(), make_images()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(images)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), convolve_naively(layer, images), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_traced_layer_uses_torch():
    layer, images = make_layer(), make_images()
    traced = torch.jit.trace(layer, (images,))
    names = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "aten::_convolution" in names
    torch.testing.assert_close(traced(make_images(seed=3)), layer(make_images(seed=3)), **TOLERANCE)


def problem():
    with pytest.raises(native.NativeError) as error:
        find_convolution()
    return error.value.problem


def test_native_convolution_is_available_with_a_compiler():
    """Otherwise, its loss would go unnoticed."""
    if shutil.which("cc") is None or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("no C compiler, or no AVX2")
    assert find_convolution().apex_convolution_works()
    assert is_native(make_layer()(make_images()))


def test_missing_library_is_logged_once_and_torch_is_used(found, monkeypatch, caplog):
    monkeypatch.setattr(convolution, "open_native", partial(native.open_native, suffixes=[".not-built"]))
    layer, images = make_layer(), make_images()
    for _ in range(2):
        out = layer(images)
    assert not is_native(out)
    torch.testing.assert_close(out.double(), convolve_naively(layer, images), **TOLERANCE)
    assert problem() == "build"
    assert len(caplog.records) == 1


def test_library_of_another_version_is_not_used():
    skip_without_convolution()
    with pytest.raises(native.NativeError, match=r"\b1000\b") as refused:
        find_convolution(interface=1_000)
    assert refused.value.problem == "build"


def test_torch_is_used_if_the_cpu_lacks_avx2(found, monkeypatch):
    class Library:
        apex_convolution_works = staticmethod(lambda: 0)

    monkeypatch.setattr(convolution, "open_native", lambda folder, name, interface: Library())
    assert not is_native(make_layer()(make_images()))
    assert problem() == "cpu"


def test_library_without_a_version_is_not_called(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "empty.c").write_text("int nothing;")
    path = tmp_path / "_empty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "empty.c"], check=True, timeout=60)
    with pytest.raises(OSError, match=r"_empty\.so"):
        native.open_native(tmp_path, "empty", 1, [".so"])
