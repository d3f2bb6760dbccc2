"""Stops paying for a run without progress: replaces the learner's host once, and then ends the cluster.

Progress is a checkpoint of a later update. Neither a learner that crashes at each start nor a restored run makes one.
"""

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from apex.cloud.host.settings import HostSettings
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import read_end
from apex.runs.mirror.objects import Objects
from apexreplay.files.atomic_files import replace_file

RECORD = "progress.json"  # the newest update, and since when there is no later one; see `_record_path`
MARK = "logs/stalled.json"  # object in the bucket: the host that was replaced. Hosts do not restore logs/.

log = logging.getLogger("apex")


class Stall(NamedTuple):
    """How long a host has had no new update."""

    update: int  # the newest update with a checkpoint
    seconds: float


def measure(settings: HostSettings) -> Stall:
    """Returns how long this host has had no new update, and records new ones; 0 s if the run has reached its limit."""
    now = time.monotonic()  # seconds since this host has booted
    path, newest = _record_path(), newest_update(settings.run / "checkpoints") or 0
    update, since = -1, now
    with suppress(OSError, ValueError, TypeError):  # the first check since the host has booted
        update, since = json.loads(path.read_text())
    if newest > update:
        update, since = newest, now
        replace_file(path, json.dumps([update, since]).encode())
    end = read_end(settings.run)  # The learner waits for the last evaluation, or the host uploads the run.
    return Stall(update, 0.0 if end is not None and end.is_limit else now - since)


def replace_host(stall: Stall, settings: HostSettings, objects: Objects, scaling: Any, own: str) -> bool:
    """Marks this host (`own`) as unhealthy, so that its group replaces it; returns False if another one was replaced.

    The bucket keeps which host was marked, and at which update. After a later update, a host may be replaced again.
    """
    mark = json.loads(objects.read(MARK)) if objects.has(MARK) else {}
    if mark.get("begun") != settings.begun or mark["update"] < stall.update:
        mark = {"begun": settings.begun, "update": stall.update, "host": own}
        objects.write(MARK, json.dumps(mark).encode())  # first, so that no host is replaced without a mark
    if mark["host"] == own:
        log.error("the auto-scaling group replaces this host; if the next one makes no update either, the cluster ends")
        scaling.set_instance_health(InstanceId=own, HealthStatus="Unhealthy")
    return bool(mark["host"] == own)


def _record_path() -> Path:
    """Returns the path of the record. It is in tmpfs, because a full disk must not hide a stall."""
    return Path(os.environ.get("RUNTIME_DIRECTORY", "/run/apex-stall")) / RECORD  # systemd sets it for the unit.
