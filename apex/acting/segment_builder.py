"""Turns the steps of E environment streams into segments: transitions, and every frame that they need once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cramjam
import numpy as np
from numpy.typing import NDArray

from apex.config import ActorConfig, EnvironmentConfig
from apex.dqn.n_step import NStep, n_step_returns
from apex.errors import require
from apex.frame_blob import make_blob
from apex.types import RECORD, Array, FrameCodec, Schema, Step


def _lz4(frame: Array) -> bytes:
    return bytes(cramjam.lz4.compress_block(frame.data, store_size=False))  # Its length is known from the schema.


COMPRESS: dict[FrameCodec, Callable[[Array], bytes]] = {
    "lz4": _lz4,
    "raw": np.ndarray.tobytes,
}  # C-contiguous frame -> bytes
MAX_SENT_PRIORITY = float(np.finfo(np.float32).max)  # finite: replay refuses a segment with any other


class Cut(NamedTuple):
    """What one stream has for its next `types.Segment`."""

    stream_index: int  # 0 ... E-1
    records: Array  # RECORD[K], K >= 1, in the order of time
    blob: bytes


class _Row(NamedTuple):
    """One step of all streams, axes [E]; stacked at a cut to [T, E]."""

    action: NDArray[np.int64]  # a_t
    reward: NDArray[np.float64]  # r_{t+1} as learned from
    terminated: NDArray[np.bool_]  # s_{t+1} is terminal for learning
    truncated: NDArray[np.bool_]
    value: NDArray[np.float32]  # Q(s_t, a_t)
    max_value: NDArray[np.float32]  # max_a Q(s_t, a)
    final_value: NDArray[np.float32]  # max_a Q(s_{t+1}, a) where s_{t+1} is the last state of a truncated episode
    taken: NDArray[np.bool_]  # False: the environment failed; the row keeps step with the others, and is no transition
    frame: NDArray[np.int64]  # newest frame of s_t, counted from the stream's beginning
    depth: NDArray[np.int64]  # how many frames of s_t's stack are real


class SegmentBuilder:
    """Collects steps, and cuts them into self-contained pieces whenever it is told to.

    The frames of a stream lie in the order of time: an episode's first, one per step, its final one, then the next
    episode's first. Only the last step of a window can end an episode, so s_{t+m}'s newest frame always lies m after
    s_t's, and `next_frame == frame + m`. Each frame is compressed once, when it comes; two segments that need it send
    the same bytes.

    Every step of every episode becomes exactly one transition. Those whose window is still open at a cut (the newest
    n - 1 at most) wait for the next one. A life loss, where it counts as terminal, closes windows with discount 0, but
    the game goes on, and so do its frames and stacks. A failed step is no transition: the one before it is the last of
    its episode, and bootstraps from the state in which the step was to be taken.
    """

    def __init__(self, actor: ActorConfig, environment: EnvironmentConfig, schema: Schema, num_streams: int) -> None:
        """The builder of a process that steps `num_streams` streams."""
        self._schema = schema
        self._compress_frame = COMPRESS[schema.codec]
        self._num_streams = num_streams
        self._gamma = actor.gamma
        self._segment_length = actor.segment_length
        self._clip_rewards = environment.clip_rewards
        self._life_loss_terminates = environment.life_loss_terminates
        self._streams = np.arange(num_streams)

    def begin(self, observation: Array) -> None:
        """Starts all streams at `observation`, frame_dtype[E, S, *F], after a reset; first of all calls."""
        shape = (self._num_streams, *self._schema.observation_shape)
        require(
            observation.shape == shape and observation.dtype == self._schema.frame_dtype,
            f"the environment's observations must be {self._schema.frame_dtype}{list(shape)}, "
            f"got {observation.dtype}{list(observation.shape)}: make it return what the schema says",
        )
        self._rows: list[_Row] = []  # From the oldest start that is pending in any stream.
        self._first = np.zeros(self._num_streams, np.int64)  # [E]  row of the oldest pending start
        self._num_steps = 0  # since the last cut
        self._frames = [[frame] for frame in self._compress(observation)]  # What the oldest pending start needs, on.
        self._oldest = np.zeros(self._num_streams, np.int64)  # [E]  number of the first frame of `_frames`
        self._frame = np.zeros(self._num_streams, np.int64)  # [E]  `frame` and `depth` of the newest observation
        self._depth = np.ones(self._num_streams, np.int64)

    @property
    def ready(self) -> bool:
        """Whether `segment_length` steps were appended since the last cut; the next call must then be `cut`."""
        return self._num_steps >= self._segment_length

    def append(
        self,
        action: NDArray[np.int64],  # [E]  a_t
        q: NDArray[np.float32],  # [E, A]  Q(s_t), which chose it
        step: Step,
        final_q: NDArray[np.float32] | None,  # [E, A]  Q(step.final_observation); None if nobody was truncated
    ) -> None:
        """Adds one step of all streams. Of `final_q` only the rows truncated and not terminated are read.

        The arrays are the caller's again on return.
        """
        if self.ready:
            raise RuntimeError(f"{self._num_steps} steps since the last cut: cut before the next step")
        bootstrapped = step.truncated & ~step.terminated
        if final_q is not None:
            final_value = np.where(bootstrapped, final_q.max(1), np.float32(0))
        elif not bootstrapped.any():
            final_value = np.zeros(self._num_streams, np.float32)
        else:
            raise ValueError("an episode was truncated: final_q, the Q-values of its final observation, must be given")
        reward = step.reward.astype(np.float64)
        failed = np.zeros(self._num_streams, np.bool_) if step.failed is None else step.failed.copy()
        if self._rows and step.failed is not None:
            before = self._rows[-1]
            cut_off = failed & ~(before.terminated | before.truncated)
            before.truncated[cut_off] = True
            before.final_value[cut_off] = q.max(1)[cut_off]
        self._rows.append(
            _Row(
                action=action.copy(),
                reward=np.clip(reward, -1.0, 1.0) if self._clip_rewards else reward,
                terminated=step.terminated | (step.life_lost & self._life_loss_terminates) | failed,
                truncated=step.truncated.copy(),
                value=q[self._streams, action],
                max_value=q.max(1),
                final_value=final_value,
                taken=~failed,
                frame=self._frame,
                depth=self._depth,
            )
        )
        ended = step.terminated | step.truncated
        finals = self._compress(step.final_observation[ended])
        for stream, frame in zip(np.flatnonzero(ended), finals, strict=True):
            self._frames[stream].append(frame)
        for frames, frame in zip(self._frames, self._compress(step.observation), strict=True):
            frames.append(frame)
        self._frame = self._frame + 1 + ended
        self._depth = np.where(ended | failed, 1, np.minimum(self._depth + 1, self._schema.stack))
        self._num_steps += 1

    def cut(self, q: NDArray[np.float32]) -> list[Cut]:
        """Hands out every transition whose window is closed; a stream that has none is left out.

        `q`, float32[E, A], is that of the newest observation, which is computed anyway to act next. May be called at
        any time. A process that ends after a cut loses no more than the open windows, n - 1 transitions of a stream.
        """
        self._num_steps = 0
        if not self._rows:
            return []
        rows = _Row(*map(np.stack, zip(*self._rows, strict=True)))
        n_step = n_step_returns(rows.reward, rows.terminated, rows.truncated, self._schema.n_step, self._gamma)
        priority = self._priorities(rows, n_step, q)
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
            records = np.empty(new.size, RECORD)
            records["n_step_return"] = n_step.n_step_return[new, stream]
            records["discount"] = n_step.discount[new, stream]
            records["priority"] = priority[new, stream]
            records["action"] = rows.action[new, stream]
            frame, depth = rows.frame[new, stream], rows.depth[new, stream]
            oldest = frame[0] - depth[0] + 1
            length = n_step.length[new, stream]
            records["frame"] = frame - oldest
            records["next_frame"] = frame - oldest + length
            records["depth"] = depth
            records["next_depth"] = np.minimum(depth + length, self._schema.stack)
            frames = self._frames[stream][oldest - self._oldest[stream] :][: frame[-1] + length[-1] + 1 - oldest]
            cuts.append(Cut(int(stream), records, make_blob(frames)))
        self._forget(rows, stop)
        return cuts

    def _compress(self, observation: Array) -> list[bytes]:
        """Compresses the newest frame of each stack, the only one that has not been seen before."""
        newest = np.ascontiguousarray(observation[:, -1], self._schema.frame_dtype)
        return [self._compress_frame(frame) for frame in newest]

    def _priorities(self, rows: _Row, n_step: NStep, q: NDArray[np.float32]) -> Array:
        """|n_step_return + discount * max_a Q(s_{t+m}, a) - Q(s_t, a_t)|, float64[T, E], by the actor's own Q."""
        following = np.concatenate([rows.max_value[1:], q.max(1)[None]])
        next_value = np.where(rows.truncated, rows.final_value, following)  # max_a Q(s_{t+1}, a) after each row
        last = np.arange(len(self._rows))[:, None] + n_step.length - 1
        bootstrap = np.take_along_axis(next_value, last, axis=0).astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf
            priority = np.abs(n_step.n_step_return + n_step.discount * bootstrap - rows.value)
        return np.fmin(priority, MAX_SENT_PRIORITY)  # Q-values that are not finite give the largest priority.

    def _forget(self, rows: _Row, stop: NDArray[np.int64]) -> None:
        """Drops the rows and frames that no start at or after row `stop`, int64[E], needs."""
        oldest = np.concatenate([rows.frame - rows.depth, (self._frame - self._depth)[None]]) + 1
        oldest_needed = oldest[stop, self._streams]
        for frames, num_unneeded in zip(self._frames, oldest_needed - self._oldest, strict=True):
            del frames[:num_unneeded]
        self._oldest = oldest_needed
        num_done = int(stop.min())
        del self._rows[:num_done]
        self._first = stop - num_done
