"""Creates a user's network, `network.factory`, and checks it. All errors are UsageErrors that name the factory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apex.algorithms.encoders import split
from apex.algorithms.parameters import num_parameters, require_finite
from apex.runtime.importer import call_factory
from apex.schema import Part, Schema
from apexreplay.errors import UsageError, describe_exception, require


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initializes networks that are created inside with this seed. torch's global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # Not torch.manual_seed: that would also seed every GPU.
        yield


class TakesParts(nn.Module):
    """Calls a module with the parts of observations: a dictionary of dtype[B, S, *shape]; bools are uint8."""

    def __init__(self, module: nn.Module, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.module = module
        self._parts = parts

    def forward(self, observation: Tensor | Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """`observation`: uint8[B, S, F], or its parts."""
        output: Tensor = self.module(split(observation, self._parts), *inputs)
        return output


class CustomNetwork:
    """A module of the user, and a random batch of two observations to check it with."""

    def __init__(self, path: str, schema: Schema) -> None:
        """`path`: package.module:name of a function of the schema that returns the module."""
        self.module: Any = call_factory("network.factory", path, nn.Module, schema)
        self._parts = schema.parts
        self._name = f"network.factory {path!r}"
        shape = (2, *schema.observation_shape)
        if schema.parts:  # Random bytes could be numbers that are not finite.
            self._observation = torch.zeros(shape, dtype=torch.uint8)
        else:
            is_image = schema.frame_dtype == "uint8"
            self._observation = torch.randint(256, shape).to(torch.uint8) if is_image else torch.rand(shape)

    def adapt(self, module: nn.Module) -> nn.Module:
        """Returns a module that calls `module` with a dictionary of parts, if the observations have parts."""
        return TakesParts(module, self._parts) if self._parts else module

    def require(self, condition: bool, problem: str, remedy: str) -> None:
        """Raises UsageError unless `condition` holds."""
        require(condition, f"{self._name}: {problem}", remedy=remedy)

    def check_output(self, part: str, shape: Sequence[int | None], compute: Callable[..., Any], *inputs: Any) -> Tensor:
        """Returns `compute(observation, *inputs)`, the output of a part of the module. None in `shape`: any number."""
        given = f"{part} of {_describe(self._observation)}"
        try:
            output = compute(self._observation, *inputs)
        except Exception as error:
            raise UsageError(f"{self._name}: {given} raised {describe_exception(error)}") from error
        wanted = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
        fits = isinstance(output, Tensor) and output.dtype is torch.float32 and output.dim() == len(shape)
        fits = fits and all(size in (None, actual) for size, actual in zip(shape, output.shape, strict=True))
        self.require(fits, f"{given} returned {_describe(output)}", f"return float32{wanted}")
        self.require(bool(output.isfinite().all()), f"{given} returned {output.tolist()}", "return finite values")
        self.require(output.requires_grad, f"{given} depends on no trainable parameter", "use an nn.Parameter")
        checked: Tensor = output
        return checked

    def check_parameters(self, module: nn.Module) -> None:
        """Raises UsageError if the parameters of `module` cannot be sent."""
        try:
            num_parameters(module)
            require_finite(module)
        except UsageError as error:
            raise UsageError(f"{self._name}: {error.problem}", error.remedy) from error


def _describe(value: Any) -> str:
    """Returns dtype and shape of a tensor, or the type of another value."""
    is_tensor = isinstance(value, Tensor)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if is_tensor else type(value).__name__
