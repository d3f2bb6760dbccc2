"""The torso of IMPALA for images (Espeholt et al. 2018, figure 3), as in Beyond The Rainbow (Clark et al. 2024).

The convolutions of its residual blocks have spectral norm 1, and its features are pooled to 6 x 6.
"""

import torch
from torch import Tensor, nn

from apex.algorithms.kernels.pixel_convolution import PixelConvolution

CHANNELS = (32, 64, 64)  # of the three blocks: twice those of IMPALA
POOLED = 6  # height and width of the features
FIRST_ITERATIONS = 15  # of a new layer, as in torch's `spectral_norm`

# The same torso for exported code; `w`: the tensors by name.
CODE = f"""\
def impala(x, name):
    def conv(x, layer):
        weight, u = w[f"{{layer}}.weight"], w.get(f"{{layer}}.u")
        weight = weight if u is None else weight / (u @ weight.flatten(1)).norm()
        return F.conv2d(x, weight, w[f"{{layer}}.bias"], padding=1)

    for i in range(0, 12, 4):
        x = F.max_pool2d(conv(x, f"{{name}}.{{i}}"), 3, 2, 1)
        for block in (f"{{name}}.{{i + 2}}.layers", f"{{name}}.{{i + 3}}.layers"):
            x = x + conv(F.relu(conv(F.relu(x), f"{{block}}.1")), f"{{block}}.3")
    return F.adaptive_max_pool2d(F.relu(x), {POOLED}).flatten(1)

"""


def impala(channels: int, scale: float) -> list[nn.Module]:
    """Returns the layers for images uint8[B, channels, H, W]. `scale`: factor on `CHANNELS`."""
    layers: list[nn.Module] = []
    for outputs in CHANNELS:
        outputs = max(1, round(outputs * scale))
        convolution = (nn.Conv2d if layers else PixelConvolution)(channels, outputs, 3, padding=1)
        layers += [convolution, nn.MaxPool2d(3, 2, 1), Residual(outputs), Residual(outputs)]
        channels = outputs
    return [*layers, nn.ReLU(), Pool((POOLED, POOLED)), nn.Flatten()]


class Residual(nn.Module):
    """Adds the output of two convolutions to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [SpectralConvolution(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        added: Tensor = features + self.layers(features)
        return added


class SpectralConvolution(nn.Conv2d):
    """A convolution whose weights are divided by the largest singular value of [outputs, inputs * height * width].

    One power iteration in each differentiated forward pass of a network in training mode follows that value (Miyato et
    al. 2018, algorithm 1). Other passes change nothing, so actors, target network and evaluations only need the buffer
    `u`, which is sent with the parameters. v is always computed from u, so the singular value u^T W v is |W^T u|.
    """

    u: Tensor  # float32[outputs]  estimate of the first left singular vector, of length 1

    def __init__(self, channels: int, outputs: int, kernel: int, *, padding: int) -> None:
        super().__init__(channels, outputs, kernel, padding=padding)
        self.register_buffer("u", nn.functional.normalize(torch.randn(outputs), dim=0))
        for _ in range(FIRST_ITERATIONS):
            self._iterate()

    def forward(self, features: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, outputs, H, W]."""
        with torch.autocast(features.device.type, enabled=False):  # bfloat16 has only 8 bits for the singular value
            u = self._iterate() if self.training and torch.is_grad_enabled() else self.u
            weight = self.weight / (u @ self.weight.flatten(1)).norm()
        output: Tensor = self._conv_forward(features, weight, self.bias)
        return output

    @torch.no_grad()
    def _iterate(self) -> Tensor:
        """Improves `u` by one power iteration, and returns a copy that later iterations do not change."""
        weight = self.weight.flatten(1)
        u = nn.functional.normalize(weight @ (weight.T @ self.u), dim=0)
        self.u.copy_(u)
        return u


class Pool(nn.Module):
    """Pools features to a size by their maxima, as `nn.AdaptiveMaxPool2d`, which ONNX does not have."""

    def __init__(self, output_size: tuple[int, int]) -> None:
        super().__init__()
        self._output_size = output_size

    def forward(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, *output_size]."""
        for axis, most in zip((2, 3), self._output_size, strict=True):
            size = int(features.shape[axis])  # ONNX would divide negative tensors differently.
            bounds = [(i * size // most, -(-(i + 1) * size // most)) for i in range(most)]
            maxima = [features.narrow(axis, first, end - first).amax(axis) for first, end in bounds]
            features = torch.stack(maxima, axis)
        return features
