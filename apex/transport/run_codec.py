"""Encodes and decodes all messages of a run: those of the replay library, parameters and evaluations."""

from collections.abc import Sequence

import numpy as np

from apex.transport.json_codec import decode_json, encode_json
from apex.transport.messages.results import EvaluationResult
from apex.types import Parameters
from apexreplay.types import Array, Stream
from apexreplay.wire.codec import Codec
from apexreplay.wire.header import Frame, MessageKind, require_field

MAX_VERSION = 2**32 - 1


class RunCodec(Codec):
    """Encodes and decodes the messages of one run. Decoders raise WireError; the arrays that they return are views."""

    def encode_parameters(self, parameters: Parameters) -> list[bytes]:
        """Returns one frame, because a subscriber with ZMQ_CONFLATE keeps only the last frame of a message."""
        body = parameters.values.astype("<f4", copy=False).tobytes()
        return self._seal(MessageKind.PARAMETERS, Stream(0, 0), parameters.version, len(parameters.values), body)

    def decode_parameters(self, frames: Sequence[Frame], num_parameters: int) -> Parameters:
        """Decodes what `encode_parameters` wrote: exactly `num_parameters` finite values."""
        header, (body,) = self._check(frames, MessageKind.PARAMETERS, 1)
        header.require_zero("shard", "sender", "incarnation")
        version, count = _version(header.number), header.num_items
        require_field(count == num_parameters, "count", f"{count} parameter values, expected {num_parameters}")
        require_field(len(body) == 4 * count, "length", f"{len(body)} bytes, expected 4 for each of {count} parameters")
        return Parameters(version, _finite(body))

    def encode_evaluation(self, result: EvaluationResult, parameters: Parameters | None) -> list[bytes]:
        """Returns one frame: header, values of the evaluated parameters (empty for None), result as JSON."""
        values = b"" if parameters is None else parameters.values.astype("<f4", copy=False).tobytes()
        version = 0 if parameters is None else parameters.version
        body = values + encode_json(result)
        return self._seal(MessageKind.EVALUATION, Stream(0, 0), version, len(values) // 4, body)

    def decode_evaluation(
        self, frames: Sequence[Frame], num_parameters: int
    ) -> tuple[EvaluationResult, Parameters | None]:
        """Decodes what `encode_evaluation` wrote."""
        header, (body,) = self._check(frames, MessageKind.EVALUATION, 1)
        header.require_zero("shard", "sender", "incarnation")
        count, cut = header.num_items, 4 * header.num_items
        require_field(count in (0, num_parameters), "count", f"{count} parameters, expected 0 or {num_parameters}")
        require_field(len(body) >= cut, "length", f"{len(body)} bytes cannot hold {count} parameter values")
        version = _version(header.number)
        result: EvaluationResult = decode_json(body[cut:], EvaluationResult)
        return result, Parameters(version, _finite(body[:cut])) if count else None


def _version(number: int) -> int:
    require_field(number <= MAX_VERSION, "number", f"parameter version {number} is above {MAX_VERSION}")
    return number


def _finite(body: memoryview) -> Array:
    values = np.frombuffer(body, "<f4")
    require_field(bool(np.isfinite(values).all()), "values", "a parameter value is not finite")
    return values
