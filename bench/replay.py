"""`python -m bench replay`: measures inserts, samples, priorities, memory and bytes of the replay server, with real
frames.

Every figure is a median of at least five intervals. Other work on the machine lowers all of them: compare only ratios
of one run (--peer measures other replay buffers, too).
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from apex.config import ActorConfig, Config, EnvironmentConfig, LearnerConfig, ReplayConfig, TransportConfig
from apex.config.arguments import Parser, positive_int, value_of
from apex.environments.factory import describe
from apex.runs.checkpoints.folder import find_latest
from apex.runs.checkpoints.policy_file import find_best
from apex.runs.folder import RunFolder
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.store.layout import stored_record_dtype
from apexreplay.store.sum_tree import SumTree
from bench.harness.command import GAME, NUM_STREAMS, Figures, VerificationError, make_parser, record_games, run_bench
from bench.harness.recording import Recording
from bench.harness.replay_fixture import LinkKind, ReplayFixture, open_replay_fixture
from bench.harness.replay_peers import PEERS, measure_peers, print_peers, ratios, read_peer
from bench.harness.report import print_budget, print_report, print_sizes
from bench.harness.results import write_record
from bench.plots.replay_sizes import check_picture, save_sizes
from bench.replay_steps import read_memory, time_batch, time_direct, time_store

PIECES = 5  # intervals; a rate is their median
BATCH_SIZE = 512  # batch size of the bars
OFFERED = 12_500  # transitions/s in "both": the rate of the paper's 360 actors
PAPER_CAPACITY = 2_000_000
SIZES = [2**power for power in range(16, 24)]
VERIFIED_BATCHES = 4


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    options = _make_parser().parse_args(argv)
    options.peer = list(map(read_peer, options.peer))
    if options.sizes:
        check_picture(options.sizes)

    def show(figures: Figures) -> None:
        print_report(figures)
        if options.peer:
            print_peers(figures)
        if options.record:
            write_record(options.record, f"python -m bench replay {shlex.join(argv)}", figures)

    return run_bench(
        lambda folder, stop: _measure(options, folder, stop),
        show,
        as_json=options.json,
        passed=lambda figures: all(f"{peer.name}_inserts_per_s" in figures for peer in options.peer),
    )


def _make_parser() -> Parser:
    parser = make_parser(
        "replay", "Measures the replay server.", seconds=60.0, of="duration of inserts and samples at once"
    )
    rows = value_of(Annotated[int, Meta(ge=BATCH_SIZE)])
    processes = value_of(Annotated[int, Meta(ge=1, le=64)])
    parser.add_argument("--run", metavar="FOLDER", help="measure also with frames of this run's policy")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PYTHON]",
        help=f"measure also {', '.join(PEERS)} (again for each), with this interpreter; default .peer-NAME/bin/python",
    )
    parser.add_argument("--record", type=Path, metavar="JSON", help="write the figures with commit and machine")
    parser.add_argument(
        "--transitions",
        type=rows,
        default=1_000_000,
        metavar="N",
        help="transitions that are stored; default 1,000,000",
    )
    parser.add_argument(
        "--frames",
        type=positive_int,
        default=100_000,
        metavar="N",
        help="distinct frames that are recorded; default 100,000",
    )
    parser.add_argument(
        "--leaves", type=rows, default=2**21, metavar="N", help="leaves for draw and update; default 2^21"
    )
    parser.add_argument(
        "--samplers", type=processes, default=1, metavar="K", help="sampler processes for batches over TCP"
    )
    parser.add_argument("--loaders", type=processes, default=1, metavar="L", help="loaders; default 1")
    parser.add_argument(
        "--link", choices=("tcp", "memory", "both"), default="both", help="how batches reach the learner"
    )
    parser.add_argument(
        "--sizes", type=Path, metavar="PNG", help="also draw a chart of draw and update over 2^16 ... 2^23 slots"
    )
    return parser


def _measure(options: argparse.Namespace, folder: Path, stop: Stop) -> Figures:
    figures: Figures = {"load_average": os.getloadavg()[0]}
    for prefix, environment, policy in _sources(options):
        config = _config(options, environment)
        schema = describe(environment, config.actor.n_step)
        place = folder / f"{prefix}recording"
        _log(f"recording {options.frames:,} frames of {environment.id}, {'trained' if policy else 'random'} policy")
        recording = record_games(place, config, schema, options.frames, stop, policy)
        figures[f"{prefix}distinct_frames"] = recording.num_distinct_frames
        if options.peer and not prefix:
            np.save(folder / "frames.npy", np.concatenate(recording.frames))
        links: list[LinkKind] = ["tcp", "memory"] if options.link == "both" else [options.link]
        for link in links:
            label = prefix + ("direct_" if link == "memory" else "")
            measured, budget = _measure_server(config, recording, place, link, options, stop)
            figures |= {f"{label}{name}": value for name, value in measured.items()}
            if budget and not prefix:
                print_budget(budget)
                figures |= {f"budget_{name}_ms": round(value, 4) for name, value in budget.items()}
        del recording
    _log(f"draw and update among {options.leaves:,} leaves")
    _check_stop(stop)
    times = time_store(options.leaves, BATCH_SIZE)
    figures |= {"draw_512_ms": times.draw, "update_512_ms": times.update}
    if options.sizes:
        curve = {}
        for size in SIZES:
            _check_stop(stop)
            curve[size] = time_store(size, BATCH_SIZE)
        print_sizes(curve)
        save_sizes(options.sizes, curve, BATCH_SIZE)
        print(f"wrote {options.sizes}")
        figures["size_ratio"] = max(big / small for small, big in zip(curve[SIZES[0]], curve[SIZES[-1]], strict=True))
    seconds = PIECES * _seconds_of_piece(options)
    figures |= measure_peers(options.peer, folder / "frames.npy", options.transitions, seconds, stop, _log)
    return {name: float(f"{value:.6g}") for name, value in (figures | ratios(figures)).items()}


def _sources(options: argparse.Namespace) -> list[tuple[str, EnvironmentConfig, Path | None]]:
    """Returns the sources of frames: prefix of the figures, game, and path of the policy (None: random actions)."""
    sources: list[tuple[str, EnvironmentConfig, Path | None]] = [("", EnvironmentConfig(id=GAME), None)]
    if options.run:
        run = RunFolder.open(options.run)
        policy = find_best(run.checkpoints) or find_latest(run.checkpoints).path
        if policy is None:
            raise UsageError(f"{run.path} has no policy yet: train it for longer")
        sources.append(("trained_", run.config.environment, policy))
    return sources


def _config(options: argparse.Namespace, environment: EnvironmentConfig) -> Config:
    capacity = options.transitions + 10_000  # Whole segments are evicted: with this margin, the requested number stays.
    return Config(
        environment=environment,
        actor=ActorConfig(num_actors=NUM_STREAMS),
        replay=ReplayConfig(capacity=capacity, min_size_to_sample=options.transitions, num_samplers=options.samplers),
        learner=LearnerConfig(batch_size=BATCH_SIZE, num_loaders=options.loaders),
        transport=TransportConfig(port_offset=4_000, lease_seconds=86_400.0),  # The writer sends no heartbeats.
    )


# --- with the server --------------------------------------------------------------------------------------------------


def _measure_server(
    config: Config, recording: Recording, folder: Path, link: LinkKind, options: argparse.Namespace, stop: Stop
) -> tuple[Figures, dict[str, float]]:
    each = recording.image_bytes / len(recording.records)
    max_bytes = int(1.1 * each * config.replay.capacity) + 2**22
    config = replace(config, replay=replace(config.replay, max_bytes=max_bytes))
    figures: Figures = {}
    budget: dict[str, float] = {}
    with open_replay_fixture(config, recording, folder, link, stop) as bed:
        empty, _ = read_memory(bed.processes)
        _log(f"inserting {options.transitions:,} transitions")
        figures |= _insert(bed, options.transitions)
        if link == "tcp":
            grown = read_memory(bed.processes)[0] - empty
            figures["grown_bytes_per_transition"] = grown / options.transitions
        _log(f"checking samples against the recording ({link})")
        figures["verified_transitions"] = verify(bed, recording, VERIFIED_BATCHES)
        _log(f"sampling ({link})")
        bed.longest_wait = 0.0
        figures["sample_batches_per_s"] = _sample(bed, _seconds_of_piece(options))
        figures["sample_longest_wait_ms"] = 1e3 * bed.longest_wait
        if link == "tcp":
            figures |= _memory(bed, options.transitions, each)
        _log(f"all at once for {options.seconds:g} s ({link})")
        figures |= _both(bed, options.seconds)
        if link == "tcp":
            _log("the steps of one batch")
            budget = time_batch(bed.store, bed.config, bed.schema)
        else:
            figures["batch_ms"] = time_direct(bed.store, bed.config, bed.schema)
    return figures, budget


def _seconds_of_piece(options: argparse.Namespace) -> float:
    return float(max(0.2, options.seconds / 12))


def _insert(bed: ReplayFixture, transitions: int) -> Figures:
    pieces = []
    for _ in range(PIECES):
        bed.begin_insert(transitions=-(-transitions // PIECES))
        pieces.append(bed.end_insert())
    return {
        "insert_transitions_per_s": statistics.median(piece.transitions / piece.seconds for piece in pieces),
        "bytes_per_transition": sum(piece.num_bytes for piece in pieces) / sum(piece.transitions for piece in pieces),
        "resent_segments": sum(piece.num_resent for piece in pieces),
    }


def verify(bed: ReplayFixture, recording: Recording, num_batches: int) -> int:
    """Compares samples with the recording, by key; returns their number. Raises VerificationError.

    The writer sends the segments of the recording in order, repeatedly and over one connection, and keys have no gaps.
    Therefore key k is transition k modulo the length of the recording.
    """
    checked = 0
    for _ in range(num_batches):
        batch = bed.receive()
        rounds, rows = np.divmod(batch.keys, len(recording.records))
        piece = np.searchsorted(recording.pieces["first_record"], rows, side="right") - 1
        wanted = recording.records[rows]
        sound = batch.version == rounds * len(recording.pieces) + piece
        for name in ("n_step_return", "discount", "action"):
            sound &= getattr(batch, name) == wanted[name]
        sound &= (batch.stacks == recording.stacks(rows)).reshape(2, len(rows), -1).all(axis=(0, 2))
        if not sound.all():
            wrong = batch.keys[~sound]
            raise VerificationError(f"{len(wrong)} of {len(rows)} transitions differ from what was sent: keys {wrong}")
        bed.answer(batch, np.abs(batch.n_step_return) + np.float32(0.1))
        checked += len(rows)
    return checked


def _sample(bed: ReplayFixture, seconds: float) -> float:
    return statistics.median(_take(bed, seconds) for _ in range(PIECES))


def _take(bed: ReplayFixture, seconds: float) -> float:
    """Returns batches per second; priorities of each are returned."""
    priorities = np.random.default_rng(3).random(bed.config.learner.batch_size, np.float32) + np.float32(0.01)
    began = time.monotonic()
    count = 0
    while (elapsed := time.monotonic() - began) < seconds or not count:
        bed.answer(bed.receive(), priorities)
        count += 1
    return count / elapsed


def _both(bed: ReplayFixture, seconds: float) -> Figures:
    bed.begin_insert(seconds=seconds, rate=OFFERED)
    rates = [_take(bed, seconds / PIECES) for _ in range(PIECES)]
    inserted = bed.end_insert()
    return {
        "both_insert_transitions_per_s": inserted.transitions / inserted.seconds,
        "both_sample_batches_per_s": statistics.fmean(rates),
        "both_sample_slowest_batches_per_s": min(rates),
    }


def _memory(bed: ReplayFixture, transitions: int, image_bytes: float) -> Figures:
    whole, shared = read_memory(bed.processes)
    stored = stored_record_dtype(bed.schema.table).itemsize + image_bytes
    tables = 8 * SumTree.num_nodes(PAPER_CAPACITY)
    extrapolated = whole - shared + PAPER_CAPACITY * stored + tables
    return {
        "memory_bytes": whole,
        "memory_transitions": transitions,
        "memory_bytes_2m": whole if transitions == PAPER_CAPACITY else extrapolated,
        "store_bytes_per_transition": stored + tables / PAPER_CAPACITY,
        "record_bytes_per_transition_on_wire": bed.schema.table.record.itemsize,
    }


def _check_stop(stop: Stop) -> None:
    if stop.poll():
        raise KeyboardInterrupt


def _log(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)
