"""Turns the steps of E environment streams into segments of sequences, for recurrent agents."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.acting.segment_builder import Row, SegmentBuilder
from apex.algorithms.n_step import NStep
from apex.config import Config
from apex.schema import Schema
from apex.types import Step
from apexreplay.frame_blob import make_blob
from apexreplay.item_kinds import Array
from apexreplay.types import Cut


class _Place(NamedTuple):
    """Where one step of all streams is in its episode, axes [E]."""

    age: NDArray[np.int64]  # number of the step in its episode, from 0
    over: NDArray[np.bool_]  # whether it is the last step of its episode, or was not played
    state: Array  # float32[E, D]  state of the agent before the step


class SequenceBuilder(SegmentBuilder):
    """Collects steps, and cuts them into self-contained segments of overlapping sequences.

    The steps are those of `SegmentBuilder`, with the same n-step windows. An episode begins a sequence every P steps.
    Of its L = B + P + n steps, the first B only prepare the state of the agent, the next P are trained, and the last n
    are the states from which windows bootstrap. So every step is trained by exactly one sequence; the steps 0 ... B - 1
    by the first one, which begins with the exact state and needs no preparation. Sequences end with their episode.
    """

    def __init__(self, config: Config, schema: Schema, num_streams: int) -> None:
        """Creates a builder for `num_streams` streams; call `begin` next."""
        rescaled = config.network.value_rescaling
        super().__init__(config.actor, config.environment, schema, num_streams, rescaled=rescaled)
        self._length, self._period = schema.sequence_length, schema.sequence_period
        self._burn_in = self._length - self._period - schema.n_step
        self._max_share = config.r2d2.priority_max_share

    def begin(self, observation: Array) -> None:
        """See `SegmentBuilder.begin`."""
        super().begin(observation)
        self._places: list[_Place] = []  # of the steps in `_rows`
        self._age = np.zeros(self._num_streams, np.int64)

    def append(
        self,
        action: Array,
        value: NDArray[np.float32],
        state_value: NDArray[np.float32],
        step: Step,
        final_value: NDArray[np.float32] | None,
        state: Array | None = None,
    ) -> None:
        """See `SegmentBuilder.append`. `state` None: all zero, see `RecurrentAgent.state`."""
        super().append(action, value, state_value, step, final_value)
        over = step.over
        if step.unplayed is not None and self._places:
            self._places[-1].over[step.unplayed] = True
        own = np.zeros((self._num_streams, self._schema.state_size), np.float32) if state is None else state.copy()
        self._places.append(_Place(self._age, over, own))
        self._age = np.where(over, 0, self._age + 1)

    def _cut(
        self, rows: Row, n_step: NStep, last: NDArray[np.int64], priority: Array
    ) -> tuple[list[Cut], NDArray[np.int64]]:
        """See `SegmentBuilder._cut`."""
        num_rows, age = len(self._rows), np.stack([place.age for place in self._places])
        over = np.stack([place.over for place in self._places])
        begins = rows.taken & (age % self._period == 0)
        cuts, stop = [], np.full(self._num_streams, num_rows)
        for stream in range(self._num_streams):
            ends = np.flatnonzero(over[:, stream])
            records: list[Array] = []
            newest: list[int] = []  # frame of each sequence's last step
            for begin in np.flatnonzero(begins[:, stream]):
                if begin < self._first[stream]:
                    continue
                end = ends[np.searchsorted(ends, begin) :][:1]  # row of the episode's last step, if it is over
                most = int(end[0] - begin) + 2 if len(end) else self._length + 1
                if most > self._length and num_rows - begin < self._length - 1:
                    stop[stream] = begin
                    break
                depth = min(most, self._length)  # steps of the sequence, with the last state of the episode
                warm = 0 if age[begin, stream] == 0 else self._burn_in
                trained = slice(warm, min(depth - 1, self._length - self._schema.n_step))
                if trained.stop <= warm:  # The previous sequence has trained all that is left of the episode.
                    continue
                record = np.zeros((), self._schema.table.record)
                taken = slice(begin + trained.start, begin + trained.stop)
                record["state"] = self._places[begin].state[stream]
                record["span"][trained] = n_step.length[taken, stream]
                record["n_step_return"][trained] = n_step.n_step_return[taken, stream]
                record["discount"][trained] = n_step.discount[taken, stream]
                record["action"][trained] = rows.action[taken, stream]
                if self._schema.masked:
                    record["next_mask"][trained] = rows.next_mask[last[taken, stream], stream]
                record["priority"] = mix(priority[taken, stream], self._max_share)
                record["depth"] = depth
                newest.append(int(rows.frame[begin, stream]) + depth - 1)
                records.append(record)
            if records:
                segment, at = np.stack(records), int(self._oldest[stream])
                oldest = newest[0] + 1 - int(segment["depth"][0])
                segment["frame"] = np.array(newest) - oldest
                cuts.append(Cut(stream, segment, make_blob(self._frames[stream][oldest - at : newest[-1] + 1 - at])))
        del self._places[: int(stop.min())]
        return cuts, stop


def mix(td_errors: Array, max_share: float) -> float:
    """Returns the priority of a sequence: `max_share` * max + (1 - `max_share`) * mean of its |TD errors| [R2D2]."""
    return float(max_share * td_errors.max() + (1 - max_share) * td_errors.mean())
