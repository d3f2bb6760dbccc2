"""The keys of a machine of a cluster: its own pair, and whose public halves it believes.

Secrets never leave the machine. Public halves are parameters of AWS's parameter store, /apex/CLUSTER/keys/ROLE/HOST,
and a machine's role may write its own ROLE's only. The store takes few writes a second from all machines together, so
each writes its own once, and again after TELL_SECONDS; whose was not written for STALE_SECONDS is gone, and its key is
believed no more. All times are the store's: no clock of a machine matters.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from apex.cloud.host.settings import HostSettings
from apex.runtime.atomic_files import replace_file, sync_folder
from apex.transport.curve.key_store import PINNED, certificate, certificates, create_pair, lists_for, public_digits

TELL_SECONDS = 240.0  # between two times that a machine writes its key
STALE_SECONDS = 600.0  # five more times in a row, a minute apart, that it could not
KEY_DIGITS = 64  # hexadecimal, of 32 bytes
TOLD = ".told"  # beside the keys: what this machine has written last
CHANGED = ".changed"  # beside the keys: another machine is learner or replay server now (units/bin/apex-rekeyed)

log = logging.getLogger("apex")


class KeyEntry(NamedTuple):
    """What a machine has told."""

    role: str
    host: str
    key: str  # the public half, in hexadecimal digits
    at: datetime  # when it was written last, by the store's clock


def make_pair(folder: Path, role: str) -> None:
    """Makes the folder with the machine's own pair, unless it is there; a learner's has one for `apex status` too."""
    if (folder / f"{role}.key_secret").exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    for name in (role, "observer") if role == "learner" else (role,):
        create_pair(partial, name)
    sync_folder(partial)
    os.replace(partial, folder)  # Whole or not there: half a folder would never be made again.
    log.info("made the keys of this %s in %s", role, folder)


def tell(ssm: Any, settings: HostSettings, host: str, now: datetime) -> None:
    """Writes this machine's public half into the parameter store, unless it did a while ago; `now` by the store."""
    name, key = _name(settings, settings.role, host), public_digits(settings.keys, settings.role)
    note = settings.keys / TOLD
    with suppress(OSError, ValueError, TypeError):  # Nothing was told, or nobody knows: it is told again.
        last_name, last_key, at = json.loads(note.read_text())
        if (last_name, last_key) == (name, key) and now - datetime.fromisoformat(at) < timedelta(seconds=TELL_SECONDS):
            return
    ssm.put_parameter(Name=name, Value=key, Type="String", Overwrite=True)
    replace_file(note, json.dumps([name, key, now.isoformat()]).encode())


def ask(ssm: Any, settings: HostSettings) -> tuple[list[KeyEntry], datetime]:
    """What the machines have ever told whose keys this one needs, and when that was so, by the store's clock."""
    told: list[KeyEntry] = []
    now = datetime.min
    for role in _needed(settings):
        path = f"{settings.parameters}/keys/{role}"
        for page in ssm.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=False):
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            told += [
                KeyEntry(role, item["Name"].removeprefix(f"{path}/"), item["Value"], item["LastModifiedDate"])
                for item in page["Parameters"]
            ]
    return list(filter(_is_key, told)), now


def fresh(told: list[KeyEntry], now: datetime) -> list[KeyEntry]:
    """Of what was told what counts now.

    Of learner and replay server that is the newest key, however old: there is one machine of each, and while it is away
    nobody else may take its place.
    """
    young = [item for item in told if item.role not in PINNED and now - item.at <= timedelta(seconds=STALE_SECONDS)]
    newest = {item.role: item for item in sorted(told, key=lambda item: item.at) if item.role in PINNED}
    return [*newest.values(), *young]


def believe(told: list[KeyEntry], settings: HostSettings) -> str:
    """Writes the lists that this machine needs; returns the roles whose pinned key is missing, or ""."""
    for role in _needed(settings):
        items = [item for item in told if item.role == role]
        if items or role not in PINNED:  # Of who is pinned, what was believed before is better than nobody.
            is_first = not certificates(settings.keys, role)
            if _write_certificates(settings.keys, role, items) and role in PINNED and not is_first:
                (settings.keys / CHANGED).touch()  # A program talks to whose key was there when it began.
    return " and ".join(role for role in _needed(settings) if role in PINNED and not certificates(settings.keys, role))


def leave(ssm: Any, settings: HostSettings, host: str) -> None:
    """Takes this machine's key back: it is believed no more within a minute or two."""
    ssm.delete_parameter(Name=_name(settings, settings.role, host))


def _needed(settings: HostSettings) -> list[str]:
    """Whose keys come from other machines. The observer's is made on the learner's, for that machine."""
    return [role for role in lists_for(settings.role) if role != "observer"]


def _name(settings: HostSettings, role: str, host: str) -> str:
    return f"{settings.parameters}/keys/{role}/{host}"


def _is_key(item: KeyEntry) -> bool:
    """Whether it is a machine's name and 64 digits: it becomes a file and what is in it."""
    try:
        is_key = len(item.key) == KEY_DIGITS and len(bytes.fromhex(item.key)) == KEY_DIGITS // 2
    except ValueError:
        is_key = False
    is_key &= item.host.isascii() and item.host.replace("-", "").isalnum()
    if not is_key:
        log.error("what is told of %s %r is no key of a machine, and is passed over", item.role, item.host)
    return is_key


def _write_certificates(folder: Path, role: str, items: list[KeyEntry]) -> bool:
    """Makes the role's certificates those of `items`; returns whether any had to change."""
    wanted = {f"{role}.{item.host}.key": certificate(item.key) for item in items}
    present = {path.name: path.read_text() for path in certificates(folder, role)}
    for name in present.keys() - wanted.keys():
        (folder / name).unlink()
    for name, text in wanted.items():
        if present.get(name) != text:
            replace_file(folder / name, text.encode())
            (folder / name).chmod(0o600)
    if wanted != present:
        log.info("%s now has %d keys of the role %s: %s", folder, len(wanted), role, ", ".join(wanted))
    return wanted != present
