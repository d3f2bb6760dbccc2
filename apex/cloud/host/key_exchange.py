"""Exchanges the keys of a cluster's hosts: creates this host's key pairs and accepts public keys of other hosts.

Secret keys never leave the host. Each host publishes its public keys, with its private address, in AWS's parameter
store: /apex/CLUSTER/keys/ROLE/HOST. A host may write only the keys of its own roles. Each host writes its keys again
every PUBLISH_SECONDS, not more often, because the store limits an account's write rate. A key that its host has not
written for STALE_SECONDS is no longer accepted, except keys of learner and replay server (see `fresh`). All times are
those of the store, so the hosts' clocks do not matter.
"""

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
from apex.transport.curve.key_store import PINNED, certificate, lists_for, public_digits
from apex.types import Role
from apexreplay.errors import UsageError
from apexreplay.files.atomic_files import replace_file, sync
from apexreplay.transport.curve.key_store import certificates, create_pair

PUBLISH_SECONDS = 240.0  # time between two writes of a host's key
STALE_SECONDS = 600.0  # age at which a key is no longer accepted; allows five failed writes, one per minute
KEY_DIGITS = 64  # hexadecimal digits of a 32-byte key
PUBLISHED = ".published"  # file in the key folder: the values that this host published last, and when
CHANGED = ".changed"  # file in the key folder: learner or replay server moved to another host (units/bin/apex-rekeyed)

_ADDRESS = re.compile(r'^ +address = "(.*)"$', re.MULTILINE)

log = logging.getLogger("apex")


class KeyEntry(NamedTuple):
    """The public key of one role, as published by its host."""

    role: Role
    host: str
    key: str  # the public key, in hexadecimal digits
    address: str  # private IPv4 address
    at: datetime  # time of the last write, by the store's clock

    @property
    def certificate(self) -> str:
        """The text of the key's certificate, which contains the address as metadata."""
        return _certificate(self.key, self.address)


def make_pairs(settings: HostSettings, address: str) -> None:
    """Creates the folder with a key pair for each role of this host, unless the folder exists.

    The learner's host also gets a pair for the observer.
    """
    folder = settings.keys
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    for name in (*settings.roles, Role.OBSERVER) if Role.LEARNER in settings.roles else settings.roles:
        create_pair(partial, name)
        (partial / f"{name}.key").write_text(_certificate(public_digits(partial, name), address))
    for path in (*partial.iterdir(), partial):
        sync(path)
    os.replace(partial, folder)  # Atomic, because an existing folder is never changed, even if it is incomplete.
    sync(folder.parent)
    log.info("created this host's keys in %s", folder)


def publish(ssm: Any, settings: HostSettings, host: str, address: str, now: datetime) -> None:
    """Writes this host's public keys to the parameter store, at most every PUBLISH_SECONDS; `now`: the store's time."""
    roles, keys = settings.roles, settings.keys
    values = {_name(settings, role, host): f"{public_digits(keys, role)} {address}" for role in roles}
    note = settings.keys / PUBLISHED
    with suppress(OSError, ValueError, TypeError):  # The file is missing or damaged: write again.
        last, at = json.loads(note.read_text())
        if last == values and now - datetime.fromisoformat(at) < timedelta(seconds=PUBLISH_SECONDS):
            return
    for name, value in values.items():
        ssm.put_parameter(Name=name, Value=value, Type="String", Overwrite=True)
    replace_file(note, json.dumps([values, now.isoformat()]).encode())


def ask(ssm: Any, settings: HostSettings) -> tuple[list[KeyEntry], datetime]:
    """Returns all published keys of the roles that this host needs, however old, and the store's current time."""
    found: list[KeyEntry | None] = []
    now = datetime.min
    for role in _needed(settings):
        path = f"{settings.parameters}/keys/{role}"
        for page in ssm.get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=False):
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            found += [_read(role, item) for item in page["Parameters"]]
    return [entry for entry in found if entry is not None], now


def fresh(published: list[KeyEntry], now: datetime) -> list[KeyEntry]:
    """Returns the entries that are valid now.

    For learner and replay server, only the newest key is valid, however old: each of these roles has one host, and
    while that host is away, no other host may take its place. For other roles, all keys younger than STALE_SECONDS are
    valid.
    """
    stale = now - timedelta(seconds=STALE_SECONDS)
    young = [entry for entry in published if entry.role not in PINNED and entry.at >= stale]
    newest = {entry.role: entry for entry in sorted(published, key=lambda entry: entry.at) if entry.role in PINNED}
    return [*newest.values(), *young]


def accept(entries: list[KeyEntry], settings: HostSettings) -> str:
    """Writes the certificates that this host needs; returns the roles whose pinned key is missing, joined by "and"."""
    for role in _needed(settings):
        of_role = [entry for entry in entries if entry.role == role]
        if of_role or role not in PINNED:  # Without a new pinned key, the old one stays.
            is_first = not certificates(settings.keys, role)
            if _write_certificates(settings.keys, role, of_role) and role in PINNED and not is_first:
                (settings.keys / CHANGED).touch()  # Running programs must restart to use the new key.
    return " and ".join(role for role in _needed(settings) if role in PINNED and not certificates(settings.keys, role))


def withdraw(ssm: Any, settings: HostSettings, host: str) -> None:
    """Removes this host's keys from the store. Other hosts stop accepting them within two minutes."""
    for role in settings.roles:
        ssm.delete_parameter(Name=_name(settings, role, host))


def learner_address(settings: HostSettings) -> str:
    """Returns the learner's private address. Raises UsageError if the learner's key has not arrived yet."""
    for path in certificates(settings.keys, Role.LEARNER):
        if found := _ADDRESS.search(path.read_text()):
            return found[1]
    raise UsageError(f"the learner's key is not in {settings.keys} yet: check the log of apex-keys.service")


def _needed(settings: HostSettings) -> list[Role]:
    """Returns the roles whose keys come from other hosts. The observer's key never leaves the learner's host."""
    needed = {name for role in settings.roles for name in lists_for(role)} - {*settings.roles, Role.OBSERVER}
    return sorted(needed)


def _name(settings: HostSettings, role: Role, host: str) -> str:
    return f"{settings.parameters}/keys/{role}/{host}"


def _read(role: Role, item: dict[str, Any]) -> KeyEntry | None:
    """Parses a parameter; returns None if it is malformed. Validates it: it becomes the name and content of a file."""
    host = str(item["Name"]).rpartition("/")[2]
    try:
        key, address = str(item["Value"]).split()
        is_host = host.isascii() and host.replace("-", "").isalnum()
        if is_host and len(key) == KEY_DIGITS and len(bytes.fromhex(key)) == KEY_DIGITS // 2:
            return KeyEntry(role, host, key, str(IPv4Address(address)), item["LastModifiedDate"])
    except ValueError:
        pass
    log.error("ignoring the key of the %s on host %r: expected 64 hexadecimal digits and an IPv4 address", role, host)
    return None


def _certificate(key: str, address: str) -> str:
    return f'metadata\n    address = "{address}"\n{certificate(key)}'


def _write_certificates(folder: Path, role: Role, entries: list[KeyEntry]) -> bool:
    """Replaces the role's certificates by those of `entries`; returns whether anything changed."""
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
