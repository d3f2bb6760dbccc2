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
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from apex.files import replace_file, sync_folder
from apex.host_settings import HostSettings
from apex.key_folder import KEY_DIGITS, PINNED, lists_for, write_private
from apex.sockets import new_key_pair, public_key

STALE_SECONDS = 600.0  # ten times in a row that a machine could not write
CHANGED = ".changed"  # beside the keys: another machine is learner or replay server now (units/bin/apex-rekeyed)

log = logging.getLogger("apex")


class Told(NamedTuple):
    """What a machine has told."""

    role: str
    host: str
    key: str  # the public half, in hexadecimal digits
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


def tell(ssm: Any, settings: HostSettings, host: str) -> datetime:
    """Writes this machine's public half into the parameter store; returns when, by the store's clock."""
    secret = bytes.fromhex((settings.keys / f"{settings.role}.secret").read_text())
    answer = ssm.put_parameter(
        Name=_name(settings, settings.role, host), Value=public_key(secret).hex(), Type="String", Overwrite=True
    )
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def ask(ssm: Any, settings: HostSettings, now: datetime) -> list[Told]:
    """What the machines have told whose keys this one needs; of those only whose word is fresh.

    Of learner and replay server the newest key counts, however old: there is one machine of each, and while it is away
    nobody else may take its place.
    """
    told: list[Told] = []
    for role in _needed(settings):
        path = f"{settings.parameters}/keys/{role}"
        pages = ssm.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=False)
        found = [
            Told(role, item["Name"].removeprefix(f"{path}/"), item["Value"], item["LastModifiedDate"])
            for page in pages
            for item in page["Parameters"]
        ]
        found = sorted(filter(_is_key, found), key=lambda item: item.at)
        fresh = [item for item in found if now - item.at <= timedelta(seconds=STALE_SECONDS)]
        told += found[-1:] if role in PINNED else fresh
    return told


def believe(told: list[Told], settings: HostSettings) -> str:
    """Writes the lists that this machine needs; returns the roles whose pinned key is missing, or ""."""
    for role in _needed(settings):
        items = [item for item in told if item.role == role]
        if items or role not in PINNED:  # Of who is pinned, what was believed before is better than nobody.
            path = settings.keys / f"{role}.public"
            is_first = not path.exists()
            if _write_list(path, items) and role in PINNED and not is_first:
                (settings.keys / CHANGED).touch()  # A program talks to whose key was there when it began.
    missing = [role for role in _needed(settings) if role in PINNED and not (settings.keys / f"{role}.public").exists()]
    return " and ".join(missing)


def leave(ssm: Any, settings: HostSettings, host: str) -> None:
    """Takes this machine's key back: it is believed no more within a minute or two."""
    ssm.delete_parameter(Name=_name(settings, settings.role, host))


def _needed(settings: HostSettings) -> list[str]:
    """Whose keys come from other machines. The observer's is made on the learner's, for that machine."""
    return [role for role in lists_for(settings.role) if role != "observer"]


def _name(settings: HostSettings, role: str, host: str) -> str:
    return f"{settings.parameters}/keys/{role}/{host}"


def _is_key(item: Told) -> bool:
    """Whether it is a machine's name and 64 digits: it becomes a line of a list."""
    try:
        is_key = len(item.key) == KEY_DIGITS and len(bytes.fromhex(item.key)) == KEY_DIGITS // 2
    except ValueError:
        is_key = False
    is_key &= item.host.isascii() and item.host.replace("-", "").isalnum()
    if not is_key:
        log.error("what is told of %s %r is no key of a machine, and is passed over", item.role, item.host)
    return is_key


def _write_list(path: Path, items: list[Told]) -> bool:
    """Writes a list where it differs, and says whether: roles look at what has changed, and cut who is gone."""
    lines = sorted(f"{item.key} {item.host}\n" for item in items)
    data = "".join(lines).encode()
    if path.exists() and path.read_bytes() == data:
        return False
    replace_file(path, data)
    path.chmod(0o600)
    log.info("%s now lists %d: %s", path, len(items), ", ".join(item.host for item in items))
    return True
