"""Fits a run to this host before any program of it is started, or refuses it by the checks of `apex doctor`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from apex.checks import check_gpu, check_room, read_room, require_all
from apex.config import Config
from apex.cuda import read_cuda
from apex.leftovers import find_leftovers
from apex.machine import raise_file_limit, read_machine
from apex.needs import files_needed
from apex.ports import choose_ports, is_free
from apex.run_folder import describe_versions
from apex.sizing import explain, size_to_machine
from apex.types import Schema


def fit(
    config: Config,
    schema: Schema,
    tell: Callable[[str], None],
    own: Path | None = None,
    *,
    free: Callable[[str, int], bool] = is_free,
) -> tuple[Config, list[str]]:
    """Returns the configuration with every size and free ports, and the lines that say by what arithmetic.

    Raises ConfigError with the remedy where anything is short. `tell` hears of ports that are not those that were asked
    for; `own` is the store of a run that is to go on; `free` tells whether a port of a host may be had.
    """
    cuda = read_cuda()
    machine = read_machine(cuda)
    gpu = check_gpu(config.learner.device, cuda, describe_versions()["torch"] or "")
    require_all([gpu])
    sizes = explain(config, machine, schema)
    if gpu.verdict == "warning":
        sizes.append(f"GPU: {gpu.figures}: {gpu.remedy}")
    config = choose_ports(size_to_machine(config, machine, schema), free, tell)
    require_all(check_room(config, schema, read_room(machine, cuda, find_leftovers(), own, config.learner.device)))
    raise_file_limit(files_needed(config)[0])
    return config, sizes
