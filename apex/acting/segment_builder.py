"""Turns the steps of E environment streams into segments: transitions, and each frame they need once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.algorithms.n_step import NStep, n_step_returns, n_step_target, rescale, restore
from apex.config import ActorConfig, EnvironmentConfig
from apex.schema import Schema, pack_mask
from apex.types import Step
from apexreplay.errors import require
from apexreplay.frame_blob import make_blob
from apexreplay.frames.encoder import COMPRESS
from apexreplay.item_kinds import Array
from apexreplay.types import Cut

# The replay server refuses segments whose priorities are not finite.
MAX_SENT_PRIORITY = float(np.finfo(np.float32).max)


class Row(NamedTuple):
    """One step of all streams, axes [E]; stacked at a cut to [T, E]."""

    action: Array  # a_t; [E, K] for continuous actions
    reward: NDArray[np.float64]  # r_{t+1} as used for training: scaled, clipped
    terminated: NDArray[np.bool_]  # s_{t+1} is terminal for learning
    truncated: NDArray[np.bool_]
    value: NDArray[np.float32]  # Q(s_t, a_t)
    state_value: NDArray[np.float32]  # bootstrap value of s_t
    final_value: NDArray[np.float32]  # bootstrap value of s_{t+1}, if that is the last state of a truncated episode
    next_mask: NDArray[np.uint8]  # [E, bytes]  actions allowed in s_{t+1}, packed
    taken: NDArray[np.bool_]  # False: the step was not played, so it becomes no transition
    frame: NDArray[np.int64]  # index of the newest frame of s_t, counted from the stream's beginning
    depth: NDArray[np.int64]  # number of real frames in s_t's stack; the others are zero


class SegmentBuilder:
    """Collects steps, and cuts them into self-contained segments on request.

    The frames of a stream are in order of time: an episode's first frame, one per step, its final frame, then the next
    episode's first. Only the last step of an n-step window can end an episode, so s_{t+m}'s newest frame is always m
    frames after s_t's, and `next_frame == frame + m`. Each frame is compressed once, on arrival; if two segments need a
    frame, both send the same bytes.

    Every step of every episode becomes exactly one transition. Transitions whose n-step window is still open at a cut
    (the newest n - 1 at most) are left for the next cut. A life loss that counts as terminal closes windows with
    discount 0, but the game continues, with its frames and stacks. A failed step becomes no transition: the previous
    step is the last of its episode, and bootstraps from the state in which the failed step was taken. A skipped step,
    which only begins an episode, becomes none either.
    """

    def __init__(
        self,
        actor: ActorConfig,
        environment: EnvironmentConfig,
        schema: Schema,
        num_streams: int,
        *,
        rescaled: bool = False,
    ) -> None:
        """Creates a builder for `num_streams` streams; call `begin` next.

        rescaled: the values passed to `append` and `cut` are h(Q), and so are the TD errors of the priorities.
        """
        self._rescaled = rescaled
        self._schema = schema
        self._compress_frame = COMPRESS[schema.codec]
        self._num_streams = num_streams
        self._actor, self._environment = actor, environment
        self._streams = np.arange(num_streams)

    def begin(self, observation: Array) -> None:
        """Starts all streams at `observation`, frame_dtype[E, S, *F], after a reset. Call this first."""
        dtype, shape = self._schema.frame_dtype, (self._num_streams, *self._schema.observation_shape)
        problem = f"observations must be {dtype}{list(shape)}, got {observation.dtype}{list(observation.shape)}"
        fits = observation.shape == shape and observation.dtype == dtype
        require(fits, problem, remedy="change the environment to match its observation space")
        self._rows: list[Row] = []  # steps, from the oldest that any stream still needs on
        self._first = np.zeros(self._num_streams, np.int64)  # [E]  row of the oldest step that is not yet a transition
        self._num_steps = 0  # steps since the last cut
        self._frames = [[frame] for frame in self._compress(observation)]  # per stream, from the oldest needed frame on
        self._oldest = np.zeros(self._num_streams, np.int64)  # [E]  index of the first frame in `_frames`
        self._frame = np.zeros(self._num_streams, np.int64)  # [E]  `frame` and `depth` of the newest observation
        self._depth = np.ones(self._num_streams, np.int64)

    @property
    def ready(self) -> bool:
        """Whether `segment_length` steps were appended since the last cut; the next call must then be `cut`."""
        return self._num_steps >= self._actor.segment_length

    def append(
        self,
        action: Array,  # [E] or [E, K]  a_t, the executed action
        value: NDArray[np.float32],  # [E]  Q(s_t, a_t)
        state_value: NDArray[np.float32],  # [E]  bootstrap value of s_t, such as max_a Q(s_t, a)
        step: Step,
        final_value: NDArray[np.float32] | None,  # [E]  bootstrap value of step.final_observation; None: none truncated
        state: Array | None = None,  # [E, D]  state of a recurrent agent before s_t; used only by `SequenceBuilder`
    ) -> None:
        """Adds one step of all streams. Reads only the rows of `final_value` that are truncated and not terminated.

        Copies the arrays, so that the caller may reuse them.
        """
        if self.ready:
            raise RuntimeError(f"{self._num_steps} steps were appended since the last cut: call cut first")
        bootstrapped = step.truncated & ~step.terminated
        if final_value is None:
            if bootstrapped.any():
                raise ValueError("an episode was truncated: pass final_value, the value of its final observation")
            final_value = np.zeros(self._num_streams, np.float32)
        reward = step.reward.astype(np.float64) * self._environment.reward_scale
        unplayed = step.unplayed
        dropped = np.zeros(self._num_streams, np.bool_) if unplayed is None else unplayed.copy()
        if self._rows and unplayed is not None:
            before = self._rows[-1]
            cut_off = dropped & ~(before.terminated | before.truncated)
            before.truncated[cut_off] = True
            before.final_value[cut_off] = state_value[cut_off]
        ended = step.terminated | step.truncated
        self._rows.append(
            Row(
                action=action.copy(),
                reward=np.clip(reward, -1.0, 1.0) if self._environment.clip_rewards else reward,
                terminated=step.terminated | (step.life_lost & self._environment.life_loss_terminates) | dropped,
                truncated=step.truncated.copy(),
                value=value.copy(),
                state_value=state_value.copy(),
                final_value=np.where(bootstrapped, final_value, np.float32(0)),
                next_mask=self._next_mask(step, ended),
                taken=~dropped,
                frame=self._frame,
                depth=self._depth,
            )
        )
        finals = self._compress(step.final_observation[ended])
        for stream, frame in zip(np.flatnonzero(ended), finals, strict=True):
            self._frames[stream].append(frame)
        for frames, frame in zip(self._frames, self._compress(step.observation), strict=True):
            frames.append(frame)
        self._frame = self._frame + 1 + ended
        self._depth = np.where(ended | dropped, 1, np.minimum(self._depth + 1, self._schema.stack))
        self._num_steps += 1

    def cut(self, state_value: NDArray[np.float32]) -> list[Cut]:
        """Returns all transitions whose n-step window is closed; leaves out streams without any.

        `state_value`, float32[E]: bootstrap value of the newest observation, which is also needed for the next action.
        May be called at any time. A process that ends after a cut loses only the open windows: at most n - 1
        transitions per stream.
        """
        self._num_steps = 0
        if not self._rows:
            return []
        rows = Row(*map(np.stack, zip(*self._rows, strict=True)))
        n_step = n_step_returns(rows.reward, rows.terminated, rows.truncated, self._schema.n_step, self._actor.gamma)
        last = np.arange(len(self._rows))[:, None] + n_step.length - 1  # index of the row of r_{t+m}
        priority = _priorities(rows, n_step, last, state_value, self._rescaled)
        cuts, stop = self._cut(rows, n_step, last, priority)
        self._forget(rows, stop)
        return cuts

    def _cut(
        self, rows: Row, n_step: NStep, last: NDArray[np.int64], priority: Array
    ) -> tuple[list[Cut], NDArray[np.int64]]:
        """Returns the segments, and the index of the first row that each stream still needs, int64[E].

        `priority`: of each step, float64[T, E]. `last`: see `_priorities`.
        """
        step_discount = np.where(rows.terminated, 0.0, self._actor.gamma)
        # Closed windows come before open ones, so a stream's new transitions are the rows first ... stop - 1.
        is_new = np.arange(len(self._rows))[:, None] >= self._first
        num_new = (n_step.complete & is_new).sum(0)
        stop = self._first + num_new
        cuts = []
        for stream in np.flatnonzero(num_new):
            new = np.arange(self._first[stream], stop[stream])
            new = new[rows.taken[new, stream]]
            if not new.size:
                continue
            records = np.empty(new.size, self._schema.table.record)
            records["n_step_return"] = n_step.n_step_return[new, stream]
            records["discount"] = n_step.discount[new, stream]
            records["priority"] = priority[new, stream]
            records["reward"] = rows.reward[new, stream]
            records["step_discount"] = step_discount[new, stream]
            records["action"] = rows.action[new, stream]
            if self._schema.masked:
                records["next_mask"] = rows.next_mask[last[new, stream], stream]
            frame, depth = rows.frame[new, stream], rows.depth[new, stream]
            oldest = frame[0] - depth[0] + 1
            length = n_step.length[new, stream]
            records["frame"] = frame - oldest
            records["next_frame"] = frame - oldest + length
            records["depth"] = depth
            records["next_depth"] = np.minimum(depth + length, self._schema.stack)
            frames = self._frames[stream][oldest - self._oldest[stream] :][: frame[-1] + length[-1] + 1 - oldest]
            cuts.append(Cut(int(stream), records, make_blob(frames)))
        return cuts, stop

    def _compress(self, observation: Array) -> list[bytes]:
        """Compresses the newest frame of each stack; the other frames were compressed before."""
        newest = np.ascontiguousarray(observation[:, -1], self._schema.frame_dtype)
        return [self._compress_frame(frame) for frame in newest]

    def _next_mask(self, step: Step, ended: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Returns the packed allowed actions in s_{t+1}, uint8[E, bytes]; 0 bytes if the schema has no masks."""
        if not self._schema.masked:
            return np.zeros((self._num_streams, 0), np.uint8)
        if step.action_mask is None or (ended.any() and step.final_mask is None):
            raise ValueError("the schema has action masks, but this step has none")
        mask = (
            step.action_mask if step.final_mask is None else np.where(ended[:, None], step.final_mask, step.action_mask)
        )
        return pack_mask(mask)

    def _forget(self, rows: Row, stop: NDArray[np.int64]) -> None:
        """Drops unneeded rows and frames; `stop`, int64[E]: index of the first row that each stream still needs."""
        oldest = np.concatenate([rows.frame - rows.depth, (self._frame - self._depth)[None]]) + 1
        oldest_needed = oldest[stop, self._streams]
        for frames, num_unneeded in zip(self._frames, oldest_needed - self._oldest, strict=True):
            del frames[:num_unneeded]
        self._oldest = oldest_needed
        num_done = int(stop.min())
        del self._rows[:num_done]
        self._first = stop - num_done


def _priorities(
    rows: Row, n_step: NStep, last: NDArray[np.int64], state_value: NDArray[np.float32], rescaled: bool
) -> Array:
    """Returns |TD error| by the actor's network, float64[T, E]; `last`, int64[T, E]: index of the row of r_{t+m}."""
    following = np.concatenate([rows.state_value[1:], state_value[None]])
    next_value = np.where(rows.truncated, rows.final_value, following)  # bootstrap value of s_{t+1} per row
    bootstrap = np.take_along_axis(next_value, last, axis=0).astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf gives NaN without a warning
        target: Array = n_step_target(
            n_step.n_step_return, n_step.discount, restore(bootstrap) if rescaled else bootstrap
        )
        td_error: Array = (rescale(target) if rescaled else target) - rows.value
    return np.fmin(np.abs(td_error), MAX_SENT_PRIORITY)  # Values that are not finite give the largest priority.
