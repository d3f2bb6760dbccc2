"""`python -m bench acting`: compares four ways to compute the Q-values of an actor's streams on one thread, by turns.

The way of the actors, in float32 or bfloat16; the same with the hidden layers of both heads as one product; the heads
in int8; and the whole network in int8. int8 is computed by torch's own operators. Their weights must be packed for each
version of the parameters: this is measured separately.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from apex.acting.worker import acts_in_bfloat16
from apex.algorithms.encoders import CONVOLUTIONS
from apex.config import Config
from apex.dqn.manual_backward.bfloat16_layers import Bfloat16Torso
from apex.dqn.manual_backward.pixel_torso import CONVOLUTIONS_IN_BODY, PixelTorso, flatten_images
from apex.dqn.manual_backward.update import has_manual_backward, make_forward
from apex.dqn.networks import PixelQNetwork, make_network
from apex.environments.factory import describe
from apex.runtime.hardware import read_bfloat16
from apex.schema import Schema
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.harness.command import Figures, make_parser, measure_in_child, read_config, run_bench
from bench.harness.report import ReportRow, print_rows

STREAMS = (16, 32, 64)
ROUNDS = 15  # turns of each way
WAYS = {
    "own": "as actors do",
    "joined": "both hidden layers as one product",
    "int8_heads": "heads in int8",
    "int8": "all in int8",
}
PACKED = list(WAYS)[1:]  # ways whose weights are prepared again for each version of the parameters
LINES = [
    *(ReportRow(f"{way}_us", f"{label}: for each stream", "us", digits=0) for way, label in WAYS.items()),
    *(ReportRow(f"{way}_ratio", f"{WAYS[way]}: time / own", "x", digits=2) for way in PACKED),
]
PACKING = [ReportRow(f"{way}_pack_ms", f"{WAYS[way]}: packing", "ms", digits=1) for way in PACKED]

Forward = Callable[[Tensor], Tensor]  # uint8[E, S, H, W] -> Q-values, float32[E, A]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    about = "Compares four ways to compute Q-values on one thread. Other options are those of apex train."
    parser = make_parser("acting", about, seconds=60.0, of="duration of all together")
    options, rest = parser.parse_known_args(argv)
    config = read_config(rest, parser.prog)
    schema = describe(config.environment, config.actor.n_step)
    run = lambda stop: measure(config, schema, options.seconds, stop)  # noqa: E731

    def show(figures: Figures) -> None:
        for streams in STREAMS:
            own = {
                name.removeprefix(f"{streams}_"): figure
                for name, figure in figures.items()
                if name.startswith(f"{streams}_")
            }
            print_rows(f"{config.environment.id}, {streams} streams", LINES, own)
        print_rows(f"network of width {config.network.width:g}, each version of the parameters", PACKING, figures)

    return run_bench(lambda folder, stop: measure_in_child("acting", run, stop), show, as_json=options.json)


class Ways:
    """The ways for one network. All share its parameters; `pack` prepares those of the way `name` again."""

    @torch.inference_mode()
    def __init__(self, network: nn.Module, *, bfloat16: bool, calibration: Tensor) -> None:
        """`calibration`: uint8[E, S, H, W], whose outputs give the scales of int8.

        Raises UsageError unless it is a dueling network for images that the actors compute by hand.
        """
        own = make_forward(network, bfloat16=bfloat16)
        if own is None or type(network) is not PixelQNetwork or network.value is None:
            raise UsageError("this measurement needs a dueling network for images with layers by hand")
        assert has_manual_backward(network, bfloat16=bfloat16)
        body = cast(nn.Sequential, network.body)
        self._network = network
        self._torso = (Bfloat16Torso if bfloat16 else PixelTorso)(body)
        self._convolutions = [cast(nn.Conv2d, body[index]) for index in CONVOLUTIONS_IN_BODY]
        self._hidden = [network.value.hidden, network.advantage.hidden]
        self._dtype = torch.bfloat16 if bfloat16 else torch.float32
        *layers, features = self._torso.forward(calibration.unsqueeze(0))
        hidden = torch.relu(torch.cat([layer(features.float()) for layer in self._hidden], 1))
        self._scales = [float(output.max()) / 255 for output in (*layers[-3:], hidden)]
        self.forward: dict[str, Forward] = {
            "own": own,
            "joined": lambda images: self._values(self._joined(self._features(images))),
            "int8_heads": lambda images: self._values(self._int8_hidden(self._quantized(self._features(images)))),
            "int8": lambda images: self._values(self._int8_hidden(self._int8_features(images))),
        }
        self.pack = {"joined": self._join, "int8_heads": self._pack_heads, "int8": self._pack_all}
        self._join()
        self._pack_all()

    def _features(self, images: Tensor) -> Tensor:
        return self._torso.forward(images.unsqueeze(0))[-1]

    def _values(self, hidden: Tensor) -> Tensor:
        """float32[E, 2 * H], those of the value first -> float32[E, A]."""
        of_value, of_advantage = hidden.chunk(2, 1)
        assert self._network.value is not None
        value, advantage = self._network.value.output(of_value), self._network.advantage.output(of_advantage)
        return cast(Tensor, advantage + (value - advantage.mean(1, keepdim=True)))

    def _join(self) -> None:
        self._weight = torch.cat([layer.weight for layer in self._hidden]).to(self._dtype)
        self._bias = torch.cat([layer.bias for layer in self._hidden])

    def _joined(self, features: Tensor) -> Tensor:
        if features.dtype is torch.float32:
            return torch.addmm(self._bias, features, self._weight.t()).relu_()
        return (features @ self._weight.t()).float().add_(self._bias).relu_()

    def _pack_heads(self) -> None:
        weight, bias = (torch.cat([getattr(layer, name) for layer in self._hidden]) for name in ("weight", "bias"))
        self._packed_hidden: Any = torch.ops.quantized.linear_prepack(_quantize_weight(weight), bias)

    def _pack_all(self) -> None:
        self._pack_heads()
        self._packed: list[Any] = [
            torch.ops.quantized.conv2d_prepack(
                _quantize_weight(layer.weight), layer.bias, layer.stride, [0, 0], [1, 1], 1
            )
            for layer in self._convolutions
        ]

    def _quantized(self, features: Tensor) -> Tensor:
        return torch.quantize_per_tensor(features.float(), self._scales[2], 0, torch.quint8)

    def _int8_features(self, images: Tensor) -> Tensor:
        # Pixels are int8 already, of scale 1/255.
        pixels = flatten_images(images.unsqueeze(0), self._convolutions[0].in_channels)
        outputs = torch._make_per_tensor_quantized_tensor(pixels, 1 / 255, 0)
        for packed, scale in zip(self._packed, self._scales[: len(CONVOLUTIONS)], strict=True):
            outputs = torch.ops.quantized.conv2d_relu(outputs, packed, scale, 0)
        return outputs.flatten(1)

    def _int8_hidden(self, features: Tensor) -> Tensor:
        hidden: Tensor = torch.ops.quantized.linear_relu(features, self._packed_hidden, self._scales[3], 0)
        return hidden.dequantize()


def measure(config: Config, schema: Schema, seconds: float, stop: Stop) -> Figures:
    """Returns the microseconds of each way for each stream, the median of its ratios in one round, and packing."""
    torch.set_num_threads(1)
    network = make_network(replace(config.network, dueling=True), schema, seed=1)
    images = torch.randint(0, 256, (max(STREAMS), *schema.observation_shape), dtype=torch.uint8)
    figures: Figures = {"network_width": config.network.width}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # These operators are deprecated.
        bfloat16 = acts_in_bfloat16(config, schema, has_bfloat16=read_bfloat16())
        ways = Ways(network, bfloat16=bfloat16, calibration=images)
        for streams in STREAMS:
            micros: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(ROUNDS + 1):
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    until = seconds / len(STREAMS) / (ROUNDS + 1) / len(WAYS)
                    one = _time(partial(ways.forward[way], images[:streams]), until, stop)
                    if number:  # The first round warms up.
                        micros[way].append(1e6 * one / streams)
            for way in WAYS:
                ratios = [one / other for one, other in zip(micros[way], micros["own"], strict=True)]
                figures[f"{streams}_{way}_us"] = statistics.median(micros[way])
                figures[f"{streams}_{way}_ratio"] = statistics.median(ratios)
        for way, pack in ways.pack.items():
            figures[f"{way}_pack_ms"] = 1e3 * statistics.median(_time(pack, 0.0, stop) for _ in range(ROUNDS))
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _quantize_weight(weight: Tensor) -> Tensor:
    """Returns qint8 of `weight`, with a scale for each output. Without VNNI, sums of two 8-bit products overflow."""
    scales = weight.flatten(1).abs().amax(1).clamp(min=1e-8) / 63
    return torch.quantize_per_channel(weight, scales, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)


def _time(run: Callable[[], object], seconds: float, stop: Stop) -> float:
    """Returns the mean seconds of a call; calls it for so many seconds, and at least once."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        if stop.poll():
            raise KeyboardInterrupt
        run()
        count += 1
    return (time.perf_counter() - began) / count
