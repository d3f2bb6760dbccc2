"""The two convolutions of a grid of cells, computed by convolution.c, with hand-written gradients.

Their outputs have the channels last: float32[B, H, W, C].
"""

from typing import cast

from torch import Tensor, nn

from apex.algorithms.encoders import Encoder, Grid
from apex.algorithms.kernels.convolution import LANES, load_convolution
from apex.dqn.manual_backward.pixel_torso import convolution_layer, last_layer_gradient


class GridTorso:
    """The body of a `networks.GridQNetwork`, if `supports_grid` accepts it."""

    def __init__(self, body: Encoder) -> None:
        self._split, self._grid = body.split, cast(Grid, body.grid)
        self._first, self._second = map(convolution_layer, _convolutions(self._grid))

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """Returns the planes of the cells, the outputs of both layers, and the features in the order of `nn.Flatten`.

        stacks: uint8[N, B, S, *F]. The results have N * B rows. Raises ValueError for grids with other planes.
        """
        (cells,) = self._split(stacks.flatten(0, 1)).values()
        planes, inputs = self._grid.planes(cells), self._first.weight.shape[1]
        if planes.shape[1:] != (inputs, *self._grid.size):  # convolution.c does not check bounds.
            expected = f"{inputs} planes of {self._grid.size} cells"
            raise ValueError(f"a batch is {stacks.dtype}{list(stacks.shape)}, expected {expected}")
        planes = planes.permute(0, 2, 3, 1).contiguous()
        first = self._first(planes)
        second = self._second(first)
        return planes, first, second, second.permute(0, 3, 1, 2).flatten(1)

    def backward(self, stacks: Tensor, outputs: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """See `layers.VectorTorso.backward`."""
        planes, first, second, features = (rows[: len(output_gradient)] for rows in outputs)
        output_gradient = last_layer_gradient(output_gradient, features, second)
        self._second.differentiate(first, output_gradient)
        self._first.differentiate(planes, self._second.input_gradient(first, output_gradient))


def supports_grid(body: Encoder) -> bool:
    """Whether convolution.c is available and supports the layers of `body.grid`, which is there."""
    layers = _convolutions(cast(Grid, body.grid))
    known = not any(any(cast(tuple[int, ...], layer.padding)) or layer.out_channels % LANES for layer in layers)
    return known and load_convolution() is not None


def _convolutions(grid: Grid) -> list[nn.Conv2d]:
    return [layer for layer in grid.layers if isinstance(layer, nn.Conv2d)]
