"""Games recorded once, so that a benchmark can send real experience as fast as it likes, and knows what it sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.config import Config
from apex.environment import make_environment
from apex.lifecycle import Stop
from apex.segments import COMPRESS, SegmentBuilder
from apex.types import RECORD, Array, Schema, make_image

# Which frames of which stream a segment carries, counted within the stream.
PIECE = np.dtype([("stream", "<i8"), ("first_frame", "<i8"), ("num_frames", "<i8"), ("first_record", "<i8")])
# What a transition's s_t truly is, noted without the builder: its newest frame, and how many of the stack are real.
TRUTH = np.dtype([("stream", "<i8"), ("frame", "<i8"), ("depth", "<i8")])

Policy = Callable[[Array], NDArray[np.int64]]


class Recording(NamedTuple):
    """Segments in the order of time, their frames as the games showed them, and what each transition must be."""

    schema: Schema
    frames: list[Array]  # of each stream: frame_dtype[T, *F], in the order of time
    pieces: Array  # PIECE[P]
    records: Array  # RECORD[K], those of the first piece, of the second, ...
    truth: Array  # TRUTH[K]
    num_distinct_frames: int
    image_bytes: int  # of all segments

    def records_of(self, piece: int) -> Array:
        """The transitions of one segment."""
        first = self.pieces["first_record"]
        stop = first[piece + 1] if piece + 1 < len(first) else len(self.records)
        return self.records[first[piece] : stop]

    def stacks(self, rows: NDArray[np.int64]) -> Array:
        """What transitions `rows`, int64[B], must look like: frame_dtype[2, B, S, *F], straight from the frames."""
        schema = self.schema
        stacks = np.zeros((2, len(rows), *schema.observation_shape), schema.frame_dtype)
        steps = self.records["next_frame"].astype(np.int64) - self.records["frame"]
        for place, row in enumerate(rows.tolist()):
            stream, frame, depth = self.truth[row].tolist()
            for half, ahead in enumerate((0, int(steps[row]))):
                newest, real = frame + ahead, min(depth + ahead, schema.stack)
                stacks[half, place, schema.stack - real :] = self.frames[stream][newest - real + 1 : newest + 1]
        return stacks


class Compressor:
    """Makes a recording's images anew, as an actor does: each frame of a stream is compressed once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._compress = COMPRESS[recording.schema.codec]
        self._kept: list[tuple[int, list[bytes]]] = [(0, []) for _ in recording.frames]  # of the last segment

    def image(self, piece: int) -> bytes:
        """The image of one segment; the frames that the one before shares with it are there already."""
        stream, first, num_frames, _ = self._recording.pieces[piece].tolist()
        kept_first, kept = self._kept[stream]
        shared = kept[first - kept_first :] if first >= kept_first else []  # Else the recording begins again.
        frames = self._recording.frames[stream]
        new = [self._compress(frames[number]) for number in range(first + len(shared), first + num_frames)]
        self._kept[stream] = first, shared + new
        return make_image(shared + new)


def record(stop: Stop, folder: Path, config: Config, schema: Schema, policy: Policy, num_frames: int) -> dict[str, Any]:
    """Plays until `num_frames` distinct frames were seen, and writes what `load` reads."""
    num_streams = config.actor.num_actors
    rng = np.random.default_rng(config.seed)
    builder = SegmentBuilder(
        schema,
        num_streams=num_streams,
        gamma=config.actor.gamma,
        segment_length=config.actor.segment_length,
        clip_rewards=config.environment.clip_rewards,
        life_loss_terminates=config.environment.life_loss_terminates,
    )
    distinct: set[int] = set()
    pieces: list[tuple[int, int, int, int]] = []
    records: list[Array] = []
    truths: list[tuple[int, int, int]] = []
    starts: list[list[tuple[int, int]]] = [[] for _ in range(num_streams)]  # (frame, depth) of steps not yet cut
    newest = np.full(num_streams, -1)
    depth = np.ones(num_streams, np.int64)
    num_bytes = 0
    environment = make_environment(config.environment, num_streams, seed=config.seed)
    with ExitStack() as opened:
        opened.callback(environment.close)
        files = [opened.enter_context(_file(folder, stream).open("wb")) for stream in range(num_streams)]

        def keep(stream: int, frame: Array) -> None:
            data = np.ascontiguousarray(frame).tobytes()
            distinct.add(hash(data))
            files[stream].write(data)
            newest[stream] += 1

        observation = environment.reset()
        builder.begin(observation)
        for stream in range(num_streams):
            keep(stream, observation[stream, -1])
        while not stop.requested:
            q = rng.random((num_streams, schema.num_actions), np.float32)
            if builder.ready:
                for cut in builder.cut(q):
                    stream, count = cut.stream_index, len(cut.records)
                    cut_starts, starts[stream] = starts[stream][:count], starts[stream][count:]
                    first_frame = cut_starts[0][0] - int(cut.records["frame"][0])
                    length = int.from_bytes(cut.image[:4], "little") // 4 - 1
                    pieces.append((stream, first_frame, length, len(truths)))
                    records.append(cut.records)
                    truths += [(stream, frame, real) for frame, real in cut_starts]
                    num_bytes += len(cut.image)
                if len(distinct) >= num_frames:
                    break
            actions = policy(observation)
            for stream in range(num_streams):
                starts[stream].append((int(newest[stream]), int(depth[stream])))
            step = environment.step(actions)
            builder.append(actions, q, step, q)
            observation = step.observation
            ended = step.terminated | step.truncated
            for stream in range(num_streams):
                if ended[stream]:
                    keep(stream, step.final_observation[stream, -1])
                keep(stream, observation[stream, -1])
            depth = np.where(ended, 1, np.minimum(depth + 1, schema.stack))
    np.save(folder / "pieces.npy", np.array(pieces, PIECE))
    np.save(folder / "records.npy", np.concatenate([*records, np.empty(0, RECORD)]))
    np.save(folder / "truth.npy", np.array(truths, TRUTH))
    return {"num_distinct_frames": len(distinct), "image_bytes": num_bytes}


def load(folder: Path, schema: Schema, facts: dict[str, Any]) -> Recording:
    """Reads what `record` wrote, frames and all, into memory; `facts` is what it returned."""
    files = sorted(folder.glob("frames-*"))
    return Recording(
        schema=schema,
        frames=[np.fromfile(file, schema.frame_dtype).reshape(-1, *schema.frame_shape) for file in files],
        pieces=np.load(folder / "pieces.npy"),
        records=np.load(folder / "records.npy"),
        truth=np.load(folder / "truth.npy"),
        num_distinct_frames=int(facts["num_distinct_frames"]),
        image_bytes=int(facts["image_bytes"]),
    )


def _file(folder: Path, stream: int) -> Path:
    return folder / f"frames-{stream:05d}"
