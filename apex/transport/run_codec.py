"""Encodes and decodes all messages of a run: those of the replay library, parameters and evaluations."""

from collections.abc import Sequence

import numpy as np

from apex.schema import Schema
from apex.transport.messages.results import EvaluationResult
from apex.types import Parameters
from apexreplay.item_kinds import Array
from apexreplay.types import Stream
from apexreplay.wire.codec import Codec, require_all
from apexreplay.wire.header import HEADER, MAGIC, WIRE_VERSION, Frame, MessageKind, require_field
from apexreplay.wire.json_codec import decode_json, encode_json

MAX_VERSION = 2**32 - 1
# Whether a message of parameters has bfloat16 -> its first bytes. The field `shard` is the format.
PARAMETER_TOPICS = {
    bfloat16: HEADER.pack(MAGIC, WIRE_VERSION, MessageKind.PARAMETERS, bfloat16, *[0] * 8)[:8]
    for bfloat16 in (False, True)
}


class RunCodec(Codec):
    """Encodes and decodes the messages of one run. Decoders raise WireError; the arrays that they return are views."""

    def __init__(self, run_id: int, schema: Schema) -> None:
        super().__init__(run_id, schema.table)
        self.schema = schema

    def encode_parameters(self, parameters: Parameters, *, bfloat16: bool = False) -> list[bytes]:
        """Returns one frame, because a subscriber with ZMQ_CONFLATE keeps only the last frame of a message.

        It begins with the format's topic. `bfloat16`: rounds the values to the nearest bfloat16, ties to even.
        """
        body, shard = parameters.values.astype("<f4", copy=False), int(bfloat16)
        if bfloat16:
            bits = body.view("<u4")
            body = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
        version, count = parameters.version, len(body)
        return self._seal(MessageKind.PARAMETERS, Stream(0, 0), version, count, body.tobytes(), shard=shard)

    def decode_parameters(self, frames: Sequence[Frame], num_parameters: int, bfloat16: bool = False) -> Parameters:
        """Decodes what `encode_parameters` wrote: exactly `num_parameters` finite values."""
        header, (body,) = self._check(frames, MessageKind.PARAMETERS, 1)
        header.require_zero("sender", "incarnation")
        require_field(header.shard == bfloat16, "shard", f"format {header.shard}, expected {bfloat16:d}")
        version, count = _version(header.number), header.num_items
        require_field(count == num_parameters, "count", f"{count} parameter values, expected {num_parameters}")
        size = 2 if bfloat16 else 4
        require_field(len(body) == size * count, "length", f"{len(body)} bytes, expected {size} for each of {count}")
        if bfloat16:
            body = memoryview((np.frombuffer(body, "<u2").astype("<u4") << 16).tobytes())
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

    def num_steps(self, records: Array) -> int:
        """Returns the number of steps that these transitions or sequences train."""
        return int((records["span"] > 0).sum()) if self.schema.sequence_length else len(records)

    def _check_records(self, records: Array, num_steps: Array | int) -> None:
        super()._check_records(records, num_steps)
        require_all(_is_share(records["discount"]), "discount", "a discount is outside [0, 1]")
        if "step_discount" in (records.dtype.names or ()):
            require_all(_is_share(records["step_discount"]), "step_discount", "a step discount is outside [0, 1]")
        if self.schema.sequence_length:
            self._check_spans(records)
        self._check_actions(records)

    def _check_spans(self, records: Array) -> None:
        """Checks that a sequence trains a step, none in its burn-in, and that each window ends at one of its steps."""
        schema, span = self.schema, records["span"].astype(np.int64)
        inside = np.arange(span.shape[1]) + span < records["depth"][:, None]
        require_all((span <= schema.n_step) & (inside | (span == 0)), "span", "a window ends beyond its sequence")
        require_all(span.max(1) > 0, "span", "a sequence trains no step")
        burn_in = span[:, : schema.sequence_length - schema.sequence_period - schema.n_step]
        begins = span[:, 0] > 0  # A sequence that begins its episode has no burn-in.
        require_all(begins | (burn_in.sum(1) == 0), "span", "a sequence trains a step of its burn-in")

    def _check_actions(self, records: Array) -> None:
        """Checks actions and masks. A mask must allow at least one action unless the discount is 0."""
        schema, action = self.schema, records["action"]
        if schema.action_size:
            require_all(np.abs(action) <= 1, "action", "an action has a component outside [-1, 1]")
        else:
            known = (action >= 0) & (action < schema.num_actions)
            require_all(known, "action", f"an action is not in 0 ... {schema.num_actions - 1}")
        if schema.masked:
            masks = records["next_mask"]
            allowed = masks.any(axis=-1) | (records["discount"] == 0)
            require_all(allowed, "mask", "a mask allows no action although the discount is not 0")
            beyond = masks[..., -1] >> (schema.num_actions - 8 * (schema.mask_bytes - 1))
            require_all(beyond == 0, "mask", f"a mask allows actions above {schema.num_actions - 1}")


def _is_share(values: Array) -> Array:
    return (values >= 0) & (values <= 1)  # False for NaN.


def _version(number: int) -> int:
    require_field(number <= MAX_VERSION, "number", f"parameter version {number} is above {MAX_VERSION}")
    return number


def _finite(body: memoryview) -> Array:
    values = np.frombuffer(body, "<f4")
    require_all(np.isfinite(values), "values", "a parameter value is not finite")
    return values
