"""`python -m bench system`: compares a whole run on this machine with its parts alone.

The run is `apex train` with these options, without evaluator and TensorBoard. Steps are counted in the replay memory,
updates in the learner's reports, both after training has begun.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from apex.config import Config, dump_toml
from apex.launch.status import ask
from apex.runs.folder import RunFolder
from apex.runtime.ports import choose_ports, is_free
from apex.transport.curve.key_store import read_keys
from apex.types import Role
from apexreplay.process.lifecycle import Stop
from bench import actor, learner
from bench.harness.command import Figures, make_parser, read_config, run_bench
from bench.harness.programs import control_address, map_stores, measure_rates, open_programs
from bench.harness.report import ReportRow, print_rows

PIECES = 5  # intervals; the rate of steps is their median
ANSWER_SECONDS = 3.0
SETTLE_SECONDS = 5.0  # warm-up time from the first update on; at most the measured time
LINES = [
    ReportRow("system_steps_per_s", "steps stored during training", "/s", digits=0, bar=1_300, stretch=2_000),
    ReportRow("system_updates_per_s", "updates", "/s", digits=2, bar=2),
    ReportRow("system_samples_per_s", "samples used in updates", "/s", digits=0),
    ReportRow("actor_steps_per_s", "steps of one actor alone on one core", "/s", digits=0),
    ReportRow("learner_resident_updates_per_s", "updates of the learner alone on one batch", "/s", digits=2),
    ReportRow("system_actor_share", "steps relative to the actor alone x processes", "%", 100, 0),
    ReportRow("system_learner_share", "updates relative to the learner alone", "%", 100, 0),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser(
        "system",
        "Measures a whole run on this machine. Other options are those of apex train.",
        seconds=60.0,
        of="of the run",
    )
    parser.add_argument("--no-alone", action="store_true", help="do not measure actor and learner alone")
    options, rest = parser.parse_known_args(argv)
    config = read_config(rest, parser.prog)
    actors = f"{config.actor.num_processes} x {config.actor.envs_per_process} environments"
    title = f"{config.environment.id}, {actors}, batch {config.learner.batch_size}"
    return run_bench(
        lambda folder, stop: measure(config, folder, options.seconds, stop, alone=not options.no_alone),
        lambda figures: print_rows(title, LINES, figures),
        as_json=options.json,
    )


def measure(config: Config, folder: Path, seconds: float, stop: Stop, *, alone: bool) -> Figures:
    """Returns all figures. The learner alone is measured last, because it keeps GPU memory of this process.

    `alone`: measure also the parts, each for at most as long as the system.
    """
    whole = replace(
        config,
        evaluator=replace(config.evaluator, enabled=False),
        transport=replace(config.transport, port_offset=7_000),
        run=replace(config.run, folder=str(folder), name="bench-system", tensorboard=False, stop_score=None),
    )
    whole = choose_ports(whole, is_free, lambda sentence: None)
    steps, updates = _time_run(whole, folder, seconds, stop)
    figures = {
        "system_steps_per_s": steps,
        "system_updates_per_s": updates,
        "system_samples_per_s": updates * config.learner.batch_size,
        "batch_size": float(config.learner.batch_size),
        "network_width": config.network.width,
    }
    if alone:
        for name, part in (("actor", actor.measure), ("learner", learner.measure)):
            place = folder / name
            place.mkdir()
            figures |= part(config, place, seconds / 2, stop)
        figures |= {
            "system_actor_share": steps / (figures["actor_steps_per_s"] * config.actor.num_processes),
            "system_learner_share": updates / figures["learner_resident_updates_per_s"],
        }
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def _time_run(config: Config, folder: Path, seconds: float, stop: Stop) -> tuple[float, float]:
    """Returns steps and updates per second."""
    file = folder / "system.toml"
    file.write_text(dump_toml(config))
    path = folder / config.run.name
    with open_programs(folder, stop) as programs:
        programs.start("train", ["train", "--config", str(file)])
        programs.wait_for((path / "manifest.json").exists, "run folder")
        run = RunFolder.open(path)
        stores = programs.wait_for(lambda: map_stores(run), "replay memory")
        programs.wait_for(lambda: _updates(run), "first update")
        settled = time.monotonic() + min(SETTLE_SECONDS, seconds)
        programs.wait_for(lambda: time.monotonic() >= settled, "time")
        began, before = time.monotonic(), _updates(run)
        rates = measure_rates(lambda: sum(store.num_inserted for store in stores), seconds, PIECES, programs.check)
        after = _updates(run)
        return statistics.median(rates), (after - before) / (time.monotonic() - began)


def _updates(run: RunFolder) -> int:
    """Returns the learner's number of updates, which it reports once a second."""
    status = ask(f"tcp://{control_address(run.config)}", ANSWER_SECONDS, read_keys(run.keys, Role.OBSERVER))
    return 0 if status is None else status.updates
