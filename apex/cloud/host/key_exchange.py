"""The keys of a cluster's host: its own pairs, and the public keys of other hosts that it accepts.

Secrets never leave the host. Public keys are parameters of AWS's parameter store, /apex/CLUSTER/keys/ROLE/HOST, each
with the host's private address; a host may write those of its own roles only. The store accepts few writes a second
from an account, so each host writes its own once, and again after PUBLISH_SECONDS; a key that was not written for
STALE_SECONDS is accepted no more. All times are the store's: no host's clock matters.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple

from apex.cloud.host.settings import HostSettings
from apex.errors import ConfigError
from apex.runtime.atomic_files import replace_file, sync_folder
from apex.transport.curve.key_store import PINNED, certificate, certificates, create_pair, lists_for, public_digits
from apex.types import Role

PUBLISH_SECONDS = 240.0  # between two writes of a host's key
STALE_SECONDS = 600.0  # five more times in a row, a minute apart, that a write failed
KEY_DIGITS = 64  # hexadecimal, of 32 bytes
PUBLISHED = ".published"  # beside the keys: what this host has written last
CHANGED = ".changed"  # beside the keys: learner or replay server is another host now (units/bin/apex-rekeyed)

_ADDRESS = re.compile(r'^ +address = "(.*)"$', re.MULTILINE)

log = logging.getLogger("apex")


class KeyEntry(NamedTuple):
    """What a host has published of one of its roles."""

    role: Role
    host: str
    key: str  # the public key, in hexadecimal digits
    address: str  # private, IPv4
    at: datetime  # of the last write, by the store's clock

    @property
    def certificate(self) -> str:
        """The text of the key's certificate, with the address as metadata."""
        return _certificate(self.key, self.address)


def make_pairs(settings: HostSettings, address: str) -> None:
    """Makes the folder with a pair for each role of this host, unless it exists; a learner's has an observer's too."""
    folder = settings.keys
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    for name in (*settings.roles, Role.OBSERVER) if Role.LEARNER in settings.roles else settings.roles:
        create_pair(partial, name)
        (partial / f"{name}.key").write_text(_certificate(public_digits(partial, name), address))
    sync_folder(partial)
    os.replace(partial, folder)  # Whole or not there: half a folder would never be completed.
    log.info("made the keys of this host in %s", folder)


def publish(ssm: Any, settings: HostSettings, host: str, address: str, now: datetime) -> None:
    """Writes this host's public keys into the parameter store, unless it did a while ago; `now` by the store."""
    roles, keys = settings.roles, settings.keys
    values = {_name(settings, role, host): f"{public_digits(keys, role)} {address}" for role in roles}
    note = settings.keys / PUBLISHED
    with suppress(OSError, ValueError, TypeError):  # Nothing was written, or the note is damaged: write again.
        last, at = json.loads(note.read_text())
        if last == values and now - datetime.fromisoformat(at) < timedelta(seconds=PUBLISH_SECONDS):
            return
    for name, value in values.items():
        ssm.put_parameter(Name=name, Value=value, Type="String", Overwrite=True)
    replace_file(note, json.dumps([values, now.isoformat()]).encode())


def ask(ssm: Any, settings: HostSettings) -> tuple[list[KeyEntry], datetime]:
    """All that was ever published of the roles whose keys this host needs, and the time by the store's clock."""
    found: list[KeyEntry | None] = []
    now = datetime.min
    for role in _needed(settings):
        path = f"{settings.parameters}/keys/{role}"
        for page in ssm.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=False):
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            found += [_read(role, item) for item in page["Parameters"]]
    return [entry for entry in found if entry is not None], now


def fresh(published: list[KeyEntry], now: datetime) -> list[KeyEntry]:
    """The entries that count now.

    Of learner and replay server that is the newest key, however old: there is one host of each, and while it is away
    nobody else may take its place.
    """
    stale = now - timedelta(seconds=STALE_SECONDS)
    young = [entry for entry in published if entry.role not in PINNED and entry.at >= stale]
    newest = {entry.role: entry for entry in sorted(published, key=lambda entry: entry.at) if entry.role in PINNED}
    return [*newest.values(), *young]


def accept(entries: list[KeyEntry], settings: HostSettings) -> str:
    """Writes the certificates that this host needs; returns the roles whose pinned key is missing, or ""."""
    for role in _needed(settings):
        of_role = [entry for entry in entries if entry.role == role]
        if of_role or role not in PINNED:  # A pinned key that was accepted before is better than none.
            is_first = not certificates(settings.keys, role)
            if _write_certificates(settings.keys, role, of_role) and role in PINNED and not is_first:
                (settings.keys / CHANGED).touch()  # A program keeps the key and the address that it began with.
    return " and ".join(role for role in _needed(settings) if role in PINNED and not certificates(settings.keys, role))


def withdraw(ssm: Any, settings: HostSettings, host: str) -> None:
    """Removes this host's keys from the store: nobody accepts them any more within a minute or two."""
    for role in settings.roles:
        ssm.delete_parameter(Name=_name(settings, role, host))


def learner_address(settings: HostSettings) -> str:
    """The learner's private address; raises ConfigError before its key has arrived."""
    for path in certificates(settings.keys, Role.LEARNER):
        if found := _ADDRESS.search(path.read_text()):
            return found[1]
    raise ConfigError(f"no key of the learner with its address in {settings.keys}: apex-keys.service writes it")


def _needed(settings: HostSettings) -> list[Role]:
    """The roles whose keys come from other hosts. The observer's is made on the learner's host, for that host."""
    needed = {name for role in settings.roles for name in lists_for(role)} - {*settings.roles, Role.OBSERVER}
    return sorted(needed)


def _name(settings: HostSettings, role: Role, host: str) -> str:
    return f"{settings.parameters}/keys/{role}/{host}"


def _read(role: Role, item: dict[str, Any]) -> KeyEntry | None:
    """Reads a parameter, which becomes a file and its content; None for a malformed one."""
    host = str(item["Name"]).rpartition("/")[2]
    try:
        key, address = str(item["Value"]).split()
        is_host = host.isascii() and host.replace("-", "").isalnum()
        if is_host and len(key) == KEY_DIGITS and len(bytes.fromhex(key)) == KEY_DIGITS // 2:
            return KeyEntry(role, host, key, str(IPv4Address(address)), item["LastModifiedDate"])
    except ValueError:
        pass
    log.error("ignoring the key of %s %r: it is not 64 hexadecimal digits and an address", role, host)
    return None


def _certificate(key: str, address: str) -> str:
    return f'metadata\n    address = "{address}"\n{certificate(key)}'


def _write_certificates(folder: Path, role: Role, entries: list[KeyEntry]) -> bool:
    """Makes the role's certificates those of `entries`; returns whether any had to change."""
    wanted = {f"{role}.{entry.host}.key": entry.certificate for entry in entries}
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
