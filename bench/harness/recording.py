"""Recorded games, so that a benchmark can send real experience at any rate and check what arrives."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.acting.segment_builder import SegmentBuilder
from apex.config import Config
from apex.environments.factory import make_environment
from apex.errors import EnvironmentFailure
from apex.schema import Schema
from apexreplay.frame_blob import make_blob, read_table
from apexreplay.frames.encoder import COMPRESS
from apexreplay.item_kinds import Array
from apexreplay.process.lifecycle import Stop
from apexreplay.types import Cut

# the stream and the frames of a segment, counted within the stream
PIECE = np.dtype([("stream", "<i8"), ("first_frame", "<i8"), ("num_frames", "<i8"), ("first_record", "<i8")])
# the true s_t of a transition, recorded without the builder: its newest frame, and the number of frames since reset
TRUTH = np.dtype([("stream", "<i8"), ("frame", "<i8"), ("depth", "<i8")])

ActFunction = Callable[[Array], NDArray[np.int64]]


class Recording(NamedTuple):
    """Segments in the order of time, the frames of the games, and the expected contents of each transition."""

    schema: Schema
    frames: list[Array]  # one array for each stream: frame_dtype[T, *F], in the order of time
    pieces: Array  # PIECE[P]
    records: Array  # record_dtype[M], in the order of the pieces
    truth: Array  # TRUTH[K]
    num_distinct_frames: int
    image_bytes: int  # bytes of the blobs of all segments

    def records_of(self, piece: int) -> Array:
        """Returns the transitions of one segment."""
        first = self.pieces["first_record"]
        stop = first[piece + 1] if piece + 1 < len(first) else len(self.records)
        return self.records[first[piece] : stop]

    def stacks(self, rows: NDArray[np.int64]) -> Array:
        """Returns the expected stacks of transitions `rows`, int64[B], from the frames: frame_dtype[2, B, S, *F]."""
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
    """Creates the blobs of a recording again, as an actor does: each frame of a stream is compressed once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._compress = COMPRESS[recording.schema.codec]
        # first frame and compressed frames of the previous segment of each stream
        self._kept: list[tuple[int, list[bytes]]] = [(0, []) for _ in recording.frames]

    def blob(self, piece: int) -> bytes:
        """Returns the blob of one segment. Frames that it shares with the previous segment are compressed already."""
        stream, first, num_frames, _ = self._recording.pieces[piece].tolist()
        kept_first, kept = self._kept[stream]
        shared = kept[first - kept_first :] if first >= kept_first else []  # Otherwise the recording starts again.
        frames = self._recording.frames[stream]
        new = [self._compress(frames[number]) for number in range(first + len(shared), first + num_frames)]
        self._kept[stream] = first, shared + new
        return make_blob(shared + new)


def record(
    stop: Stop, folder: Path, config: Config, schema: Schema, policy: ActFunction, num_frames: int
) -> dict[str, Any]:
    """Plays until there are `num_frames` distinct frames, and writes the files that `load` reads."""
    num_streams = config.actor.num_actors
    rng = np.random.default_rng(config.seed)
    builder = SegmentBuilder(config.actor, config.environment, schema, num_streams)
    environment = make_environment(config.environment, num_streams, seed=config.seed, num_threads=0)
    with ExitStack() as opened:
        opened.callback(environment.close)
        files = [opened.enter_context((folder / f"frames-{stream:05d}").open("wb")) for stream in range(num_streams)]
        tapes = [_Tape(file, schema.stack) for file in files]
        album = _Album(schema)
        observation = environment.reset()
        builder.begin(observation)
        for tape, stack in zip(tapes, observation, strict=True):
            album.see(tape.keep(stack[-1]))
        while not stop.poll():
            values = rng.random(num_streams, np.float32)  # They become the priorities, which all differ.
            if builder.ready:
                for cut in builder.cut(values):
                    album.add(cut, tapes[cut.stream_index].take(len(cut.records)))
                if album.num_distinct >= num_frames:
                    break
            actions = policy(observation)
            step = environment.step(actions)
            if step.failed is not None:
                raise EnvironmentFailure(
                    f"{config.environment.id} failed: recordings need environments without faults; see above"
                )
            builder.append(actions, rng.random(num_streams, np.float32), values, step, values)
            observation = step.observation
            ended = step.terminated | step.truncated
            for stream, tape in enumerate(tapes):
                tape.begin_step()
                if ended[stream]:
                    album.see(tape.keep(step.final_observation[stream, -1]))
                album.see(tape.keep(observation[stream, -1]))
                tape.end_step(ended=bool(ended[stream]))
    return album.save(folder)


def load(folder: Path, schema: Schema, facts: dict[str, Any]) -> Recording:
    """Reads the files of `record` into memory; `facts` is its result."""
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


class _Tape:
    """The frames of one stream in a file, and the first frame of each step that is not cut yet."""

    def __init__(self, file: BinaryIO, stack: int) -> None:
        self._file = file
        self._stack = stack
        self._newest, self._depth = -1, 1
        self._starts: list[tuple[int, int]] = []

    def keep(self, frame: Array) -> bytes:
        data = np.ascontiguousarray(frame).tobytes()
        self._file.write(data)
        self._newest += 1
        return data

    def begin_step(self) -> None:
        self._starts.append((self._newest, self._depth))

    def end_step(self, *, ended: bool) -> None:
        self._depth = 1 if ended else min(self._depth + 1, self._stack)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Returns newest frame and depth of the oldest `count` steps, and removes these steps."""
        taken, self._starts = self._starts[:count], self._starts[count:]
        return taken


class _Album:
    """The cut segments in the order of time."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._distinct: set[int] = set()
        self._pieces: list[tuple[int, int, int, int]] = []
        self._records: list[Array] = []
        self._truth: list[tuple[int, int, int]] = []
        self._image_bytes = 0

    @property
    def num_distinct(self) -> int:
        return len(self._distinct)

    def see(self, frame: bytes) -> None:
        self._distinct.add(hash(frame))

    def add(self, cut: Cut, starts: list[tuple[int, int]]) -> None:
        stream, first_frame = cut.stream_index, starts[0][0] - int(cut.records["frame"][0])
        num_frames = len(read_table(cut.blob)) - 1
        self._pieces.append((stream, first_frame, num_frames, len(self._truth)))
        self._records.append(cut.records)
        self._truth += [(stream, frame, depth) for frame, depth in starts]
        self._image_bytes += len(cut.blob)

    def save(self, folder: Path) -> dict[str, Any]:
        np.save(folder / "pieces.npy", np.array(self._pieces, PIECE))
        np.save(folder / "records.npy", np.concatenate([*self._records, np.empty(0, self._schema.table.record)]))
        np.save(folder / "truth.npy", np.array(self._truth, TRUTH))
        return {"num_distinct_frames": self.num_distinct, "image_bytes": self._image_bytes}
