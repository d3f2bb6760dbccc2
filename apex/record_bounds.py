"""The bounds of each field of a transition. They hold in every message and in the replay memory."""

from collections.abc import Iterator

import numpy as np

from apex.types import Array, Schema


def find_violation(records: Array, num_frames: Array | int, schema: Schema) -> tuple[str, str] | None:
    """Returns the first bound that a record violates, as a name and a description; None if there is none.

    `records` come from a segment, a batch or the store. `num_frames`: frames of the blob, or of each record.
    """
    bounds = _bounds(records, num_frames, schema)
    return next(((name, text) for valid, name, text in bounds if not valid.all()), None)


def _bounds(records: Array, num_frames: Array | int, schema: Schema) -> Iterator[tuple[Array, str, str]]:
    """Yields for each bound which records keep it, its name, and a description of its violation."""
    stack, n_step, action = schema.stack, schema.n_step, records["action"]
    frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
    depth, next_depth = records["depth"], records["next_depth"]
    steps = next_frame - frame
    yield np.isfinite(records["n_step_return"]), "return", "an n-step return is not finite"
    yield _is_share(records["discount"]), "discount", "a discount is outside [0, 1]"
    if schema.action_size:
        yield np.abs(action) <= 1, "action", "an action has a component outside [-1, 1]"
    else:
        known = (action >= 0) & (action < schema.num_actions)
        yield known, "action", f"an action is not in 0 ... {schema.num_actions - 1}"
    if schema.masked:
        masks = records["next_mask"]
        allowed = masks.any(axis=1) | (records["discount"] == 0)
        yield allowed, "mask", "a mask allows no action although the discount is not 0"
        beyond = masks[:, -1] >> (schema.num_actions - 8 * (schema.mask_bytes - 1))
        yield beyond == 0, "mask", f"a mask allows actions above {schema.num_actions - 1}"
    yield (depth >= 1) & (depth <= stack), "depth", f"a depth is not in 1 ... {stack}"
    yield (next_depth >= 1) & (next_depth <= stack), "depth", f"a next depth is not in 1 ... {stack}"
    yield (steps >= 1) & (steps <= n_step), "frames", f"`next_frame` is not 1 to {n_step} after `frame`"
    yield next_frame < num_frames, "frames", "`next_frame` is beyond the last frame"
    yield depth <= frame + 1, "frames", "a stack begins before the first frame"
    yield next_depth <= next_frame + 1, "frames", "a next stack begins before the first frame"
    if "priority" in (records.dtype.names or ()):  # Batches have no such fields.
        priority = records["priority"]
        yield np.isfinite(priority) & (priority >= 0), "priority", "a priority is negative or not finite"
        yield np.isfinite(records["reward"]), "reward", "a reward is not finite"
        yield _is_share(records["step_discount"]), "discount", "a step discount is outside [0, 1]"


def _is_share(values: Array) -> Array:
    return (values >= 0) & (values <= 1)  # False for NaN.
