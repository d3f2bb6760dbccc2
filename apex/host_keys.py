"""The keys of a machine of a cluster: its own pair, and whose public halves it believes.

Secrets never leave the machine. Public halves are parameters of AWS's parameter store, /apex/CLUSTER/keys/ROLE/HOST,
and a machine's role may write its own ROLE's only. Each machine writes its own once a minute; whose was not written for
STALE_SECONDS is gone, and its key is believed no more. All times are the store's: no clock of a machine matters.
"""

from __future__ import annotations

import logging
import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from apex.files import replace_file, sync_folder
from apex.host_settings import HostSettings
from apex.key_folder import KEY_DIGITS, PINNED, lists_for, write_private
from apex.sockets import new_key_pair, public_key

STALE_SECONDS = 600.0  # ten times in a row that a machine could not write
MAX_DELETED = 10  # names that one call may delete

log = logging.getLogger("apex")


class Told(NamedTuple):
    """A parameter of the cluster."""

    name: str
    value: str
    at: datetime  # when it was written last, by the store's clock


def make_pair(folder: Path, role: str) -> None:
    """Makes the folder with the machine's own pair, unless it is there; a learner's has one for `apex status` too."""
    if (folder / f"{role}.secret").exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    for name in (role, "observer") if role == "learner" else (role,):
        pair = new_key_pair()
        write_private(partial / f"{name}.secret", f"{pair.secret.hex()}\n")
        write_private(partial / f"{name}.public", f"{pair.public.hex()} {name}\n")
    sync_folder(partial)
    os.replace(partial, folder)  # Whole or not there: half a folder would never be made again.
    log.info("made the keys of this %s in %s", role, folder)


def tell(ssm: Any, settings: HostSettings, host: str) -> None:
    """Writes this machine's public half into the parameter store."""
    secret = bytes.fromhex((settings.keys / f"{settings.role}.secret").read_text())
    ssm.put_parameter(Name=_own_name(settings, host), Value=public_key(secret).hex(), Type="String", Overwrite=True)


def ask(ssm: Any, settings: HostSettings) -> list[Told]:
    """All that the cluster's machines have told."""
    pages = ssm.get_paginator("get_parameters_by_path").paginate(Path=settings.parameters, Recursive=True)
    return [
        Told(found["Name"], found["Value"], found["LastModifiedDate"]) for page in pages for found in page["Parameters"]
    ]


def believe(told: list[Told], settings: HostSettings, host: str) -> bool:
    """Writes the lists that this machine needs; whether every list of a role that all others pin has its one key.

    Of learner and replay server the newest key counts, however old: there is one machine of each, and while it is away
    nobody else may take its place.
    """
    own = next((item for item in told if item.name == _own_name(settings, host)), None)
    whole = True
    for role in lists_for(settings.role):
        items = [item for item in told if _key_of(item, settings) == role]
        if role == "observer":
            continue  # Made on this machine, for this machine.
        if role in PINNED:
            items = sorted(items, key=lambda item: item.at)[-1:]
            whole &= bool(items)
            if not items:
                continue  # What was believed before is better than nobody.
        elif own is not None:
            items = [item for item in items if not _is_stale(item, own.at)]
        _write_list(settings.keys / f"{role}.public", items)
    return whole


def forget(ssm: Any, told: list[Told], settings: HostSettings, host: str) -> None:
    """Deletes the keys of actors and evaluators that are gone; the learner does."""
    own = next((item for item in told if item.name == _own_name(settings, host)), None)
    if own is None:
        return
    roles = [role for role in lists_for(settings.role) if role not in PINNED]
    names = [item.name for item in told if _key_of(item, settings) in roles and _is_stale(item, own.at)]
    for first in range(0, len(names), MAX_DELETED):
        ssm.delete_parameters(Names=names[first : first + MAX_DELETED])
    if names:
        log.info("forgot the keys of %d machines that are gone: %s", len(names), ", ".join(names))


def has_ended(told: list[Told], settings: HostSettings, host: str) -> bool:
    """Whether the cluster's learner has said that the run is over, after this machine was first heard of."""
    own = next((item for item in told if item.name == _own_name(settings, host)), None)
    born = settings.home / "born"
    if not born.exists():
        if own is not None:
            replace_file(born, own.at.isoformat().encode())
        return False
    since = datetime.fromisoformat(born.read_text())
    return any(item.name == f"{settings.parameters}/ended" and item.at > since for item in told)


def _own_name(settings: HostSettings, host: str) -> str:
    return f"{settings.parameters}/keys/{settings.role}/{host}"


def _key_of(item: Told, settings: HostSettings) -> str:
    """Whose role's key it is; "" for what is no key of this cluster's."""
    head, _, tail = item.name.partition(f"{settings.parameters}/keys/")
    role, slash, host = tail.partition("/")
    try:
        is_key = len(item.value) == KEY_DIGITS and len(bytes.fromhex(item.value)) == KEY_DIGITS // 2
    except ValueError:
        is_key = False
    if head or not slash or not is_key or not host.isascii() or not host.replace("-", "").isalnum():
        if tail:
            log.error("%s is no key of a machine, and is passed over", item.name)
        return ""
    return role


def _is_stale(item: Told, now: datetime) -> bool:
    return now - item.at > timedelta(seconds=STALE_SECONDS)


def _write_list(path: Path, items: list[Told]) -> None:
    """Writes a list where it differs: roles look at what has changed, and cut who is not there any more."""
    lines = sorted(f"{item.value} {item.name.rsplit('/', 1)[1]}\n" for item in items)
    data = "".join(lines).encode()
    if path.exists() and path.read_bytes() == data:
        return
    replace_file(path, data)
    path.chmod(0o600)
    log.info("%s now lists %d: %s", path, len(items), ", ".join(item.name.rsplit("/", 1)[1] for item in items))
