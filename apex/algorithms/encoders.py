"""Encoders of observations: one for each part by its kind. Their outputs are joined to one vector of features.

Axes: B batch, S stacked frames, H height, W width, C channels, D numbers of a part, K indices of a part.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from apex.algorithms.impala import impala
from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apex.config.tree import Torso
from apex.schema import Part, Schema

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride of each layer for images [DQN]
MOST_SIDE = 12  # height and width of an image's features; larger ones, of images above 135 pixels, are pooled
GRID_CHANNELS = 32  # of each of the two layers for grids, at width 1
SMALL_GRID, LARGE_GRID = 7, 16  # cells; below, borders are padded; from the latter on, layers have stride 2
BITS = 8


class Encoder(nn.Module):
    """Maps observations to features: bytes [B, S, F] of `Schema.parts`, one array, or a dictionary of arrays.

    The names of a dictionary are those of the parts.
    """

    def __init__(
        self, schema: Schema, *, width: float, units: int, torso: Torso = "dqn", grid_width: float = 1.0
    ) -> None:
        """`width`, `torso`: factor on the channels, and layers for images. `units`: outputs for a vector.

        `grid_width`: factor on the channels for grids.
        """
        super().__init__()
        self._parts = schema.parts
        self._names = [part.name for part in schema.all_parts]
        # A ModuleDict accepts no names with dots.
        scales = width, grid_width
        self.encoders = nn.ModuleList(_make(part, schema.stack, scales, units, torso) for part in schema.all_parts)
        with torch.no_grad():
            example = torch.zeros(1, *schema.observation_shape, dtype=getattr(torch, schema.frame_dtype))
            self.num_features = self(example).shape[1]

    @property
    def grid(self) -> "Grid | None":
        """The encoder of the only part, if this is a grid."""
        first = self.encoders[0]
        return first if isinstance(first, Grid) and len(self.encoders) == 1 else None

    def code(self, name: str) -> str:
        """Returns the features of `x` as an expression of exported code. `name`: of this module in the state dict."""
        features = [
            cast(_PartEncoder, encode).code(f"x[{part!r}]" if self._parts else "x", f"{name}.encoders.{i}")
            for i, (encode, part) in enumerate(zip(self.encoders, self._names, strict=True))
        ]
        return features[0] if len(features) == 1 else f"torch.cat([{', '.join(features)}], 1)"

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns float [B, num_features]."""
        parts = self.split(observation)
        features = [encode(parts[name]) for encode, name in zip(self.encoders, self._names, strict=True)]
        return features[0] if len(features) == 1 else torch.cat(features, 1)

    def split(self, observation: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See the function `split`."""
        return split(observation, self._parts)


def split(frames: Tensor | Mapping[str, Tensor], parts: Sequence[Part]) -> Mapping[str, Tensor]:
    """Returns the parts of frames uint8[B, S, F], dtype[B, S, *shape] by name; bools become uint8.

    Without parts, the frames are the part "observation". Returns a dictionary of parts as it is.
    """
    if not isinstance(frames, Tensor):
        return frames
    if not parts:
        return {"observation": frames}
    found, start = {}, 0
    for part in parts:
        values = frames[..., start : start + part.num_bytes]
        if part.dtype == "bool":
            values = _bits(values).flatten(-2)[..., : prod(part.shape)]
        elif part.dtype != "uint8":
            # `contiguous` would keep the strides of a single frame, which may not be multiples of the size.
            values = values.clone(memory_format=torch.contiguous_format).view(getattr(torch, part.dtype))
        found[part.name] = values.reshape(*frames.shape[:-1], *part.shape)
        start += part.num_bytes
    return found


def channels_first(images: Tensor) -> Tensor:
    """Returns arrays [B, S, H, W] or [B, S, H, W, C] as [B, S * C, H, W]."""
    return images if images.dim() == 4 else images.permute(0, 1, 4, 2, 3).flatten(1, 2)


def convolutions(channels: int, height: int, width: int, scale: float) -> tuple[list[nn.Module], int]:
    """Returns the layers of `CONVOLUTIONS` for images uint8[B, channels, height, width], and their number of features.

    scale: factor on the channels.
    """
    layers: list[nn.Module] = []
    for outputs, kernel, stride in CONVOLUTIONS:
        outputs = max(1, round(outputs * scale))
        layers += [(nn.Conv2d if layers else PixelConvolution)(channels, outputs, kernel, stride), nn.ReLU()]
        channels, height, width = outputs, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    if max(height, width) > MOST_SIDE:
        height, width = min(height, MOST_SIDE), min(width, MOST_SIDE)
        layers.append(nn.AdaptiveMaxPool2d((height, width)))
    return [*layers, nn.Flatten()], channels * height * width


class _PartEncoder(nn.Module, ABC):
    """The encoder of one part."""

    @abstractmethod
    def code(self, x: str, name: str) -> str:
        """Returns the features of the expression `x` as exported code. `name`: of this module in the state dict."""


class _Image(_PartEncoder):
    """The torso of DQN or of IMPALA."""

    def __init__(self, part: Part, stack: int, scale: float, torso: Torso) -> None:
        height, width, channels = (*part.shape, 1)[:3]
        super().__init__()
        self._torso, channels = torso, stack * channels
        plain = convolutions(channels, height, width, scale)[0] if torso == "dqn" else None
        self.layers = nn.Sequential(*(plain or impala(channels, scale)))

    def forward(self, images: Tensor) -> Tensor:
        """uint8[B, S, H, W] or [B, S, H, W, C] -> [B, features]."""
        features: Tensor = self.layers(channels_first(images))
        return features

    def code(self, x: str, name: str) -> str:
        """See `_PartEncoder`."""
        if self._torso == "impala":
            return f'impala(image_axes({x}).float() * (1 / 255), "{name}.layers")'
        pools = [layer.output_size for layer in self.layers if isinstance(layer, nn.AdaptiveMaxPool2d)]
        strides = tuple(stride for _, _, stride in CONVOLUTIONS)
        pool = f", pool={pools[0]}" if pools else ""
        return f'convolve(image_axes({x}).float() * (1 / 255), "{name}.layers", {strides}{pool})'


class Grid(_PartEncoder):
    """Two convolutions of single cells with their neighbours.

    Each number of a cell becomes its eight bits: it is often a category, and the first layer can still add them up to
    the number.
    """

    def __init__(self, part: Part, stack: int, scale: float) -> None:
        super().__init__()
        self.size = part.shape[:2]  # cells
        side, channels = min(part.shape[:2]), (*part.shape, 1)[2] * stack
        self._is_bool = part.dtype == "bool"
        self._padding, self._stride = int(side < SMALL_GRID), 2 if side >= LARGE_GRID else 1
        own = max(1, round(GRID_CHANNELS * scale))
        sizes = [channels if part.dtype == "bool" else channels * BITS, own, own]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Conv2d(inputs, outputs, 3, self._stride, self._padding), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())

    def forward(self, grids: Tensor) -> Tensor:
        """uint8[B, S, H, W] or [B, S, H, W, C] -> [B, features]."""
        features: Tensor = self.layers(self.planes(grids))
        return features

    def planes(self, grids: Tensor) -> Tensor:
        """Returns the input of the first layer, float32[B, channels, H, W]: 0 or 1."""
        cells = channels_first(grids)
        if not self._is_bool:
            cells = _bits(cells).permute(0, 1, 4, 2, 3).flatten(1, 2)
        return cells.float()

    def code(self, x: str, name: str) -> str:
        """See `_PartEncoder`."""
        cells = f"image_axes({x})" if self._is_bool else f"bits(image_axes({x}))"
        return f'convolve({cells}, "{name}.layers", {(self._stride,) * 2}, padding={self._padding})'


class _Vector(_PartEncoder):
    """One layer; integers are divided by their largest value."""

    def __init__(self, part: Part, stack: int, units: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(stack * prod(part.shape), units), nn.ReLU())
        self._scale = 1.0 if part.dtype == "float32" else 1 / part.most

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, S, D] -> [B, units]."""
        features: Tensor = self.layers(vectors.float() * self._scale)
        return features

    def code(self, x: str, name: str) -> str:
        """See `_PartEncoder`."""
        return f'F.relu(linear("{name}.layers.1", {x}.flatten(1) * {self._scale!r}))'


class _Categories(_PartEncoder):
    """The layer of `_Vector` for one-hot vectors, given their indices."""

    def __init__(self, part: Part, stack: int, units: int) -> None:
        super().__init__()
        bound = (stack * prod(part.shape)) ** -0.5
        self._offset = part.most + 1
        self.table = nn.Parameter(torch.empty(stack * (part.most + 1), units).uniform_(-bound, bound))

    def forward(self, indices: Tensor) -> Tensor:
        """int32[B, S, K] -> [B, units]."""
        offsets = torch.arange(indices.shape[1], device=indices.device) * self._offset
        rows = (indices.long() + offsets[:, None]).flatten(1)
        return torch.relu(nn.functional.embedding(rows, self.table).sum(1))

    def code(self, x: str, name: str) -> str:
        """See `_PartEncoder`."""
        return f'embed({x}, w["{name}.table"])'


def _make(part: Part, stack: int, scales: tuple[float, float], units: int, torso: Torso) -> _PartEncoder:
    """`scales`: factors on the channels, for images and for grids."""
    if part.is_image:
        return _Image(part, stack, scales[0], torso)
    if len(part.shape) > 1 and part.dtype in ("uint8", "bool"):
        return Grid(part, stack, scales[1])
    return _Categories(part, stack, units) if part.dtype == "int32" else _Vector(part, stack, units)


def _bits(values: Tensor) -> Tensor:
    """Returns the bits of uint8[...], the lowest first: uint8[..., 8]."""
    places = torch.arange(BITS, dtype=torch.uint8, device=values.device)
    return (values.unsqueeze(-1) >> places) & 1
