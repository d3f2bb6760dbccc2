"""The command `apexreplay`: a server of tables, its status, its keys."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from apexreplay.client.client import Client
from apexreplay.errors import FINISHED, DataError, UsageError, require
from apexreplay.process.lifecycle import reports_errors, stop_on_signals
from apexreplay.server.place import PORT, Place
from apexreplay.server.standalone import run_server
from apexreplay.server.table_settings import TableSettings, read_tables
from apexreplay.serving import from_dict
from apexreplay.transport.roles import CLIENTS, create_keys
from apexreplay.version import VERSION


@reports_errors("apexreplay")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="apexreplay", description="A replay server for tables of any fields.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add(commands, "serve", _serve, "serve tables until Ctrl-C or SIGTERM")
    add = serve.add_argument
    add("--table", required=True, metavar="FILE", help="TOML file that declares the tables")
    add("--snapshots", type=Path, metavar="DIR", help="folder to save the tables in, and to restore them from")
    add("--snapshot-seconds", type=float, default=60.0, metavar="S", help="time between two snapshots (default: 60)")
    add("--bind", default="127.0.0.1", metavar="ADDRESS", help="IPv4 address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=PORT, help="control port; those of the tables follow (default: %(default)s)")
    add("--keys", type=Path, metavar="DIR", help="folder of CURVE keys; see apexreplay keys")
    add("--insecure-no-auth", action="store_true", help="allow other hosts without keys")
    add("--ready", action="store_true", help=argparse.SUPPRESS)
    status = _add(commands, "status", _status, "show the tables of a server")
    add = status.add_argument
    add("--host", default="127.0.0.1", help="host of the server (default: 127.0.0.1)")
    add("--port", type=int, default=PORT, help="control port (default: %(default)s)")
    add("--keys", type=Path, metavar="DIR", help="folder of CURVE keys")
    add("--role", choices=CLIENTS, default="administrator", help="role of the keys (default: administrator)")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--prometheus", action="store_true", help="print the text format of Prometheus")
    keys = _add(commands, "keys", _keys, "create keys for a server and its clients")
    keys.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    arguments = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    return command(arguments)


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    loopback, keys = arguments.bind.startswith("127."), arguments.keys
    remedy = "create keys with apexreplay keys DIR, or allow it with --insecure-no-auth"
    allowed = loopback or keys is not None or arguments.insecure_no_auth
    require(allowed, f"other hosts could use {arguments.bind} without keys", remedy=remedy)
    require(1 <= arguments.port <= 65_000, f"--port must be from 1 to 65000, got {arguments.port}")
    require(arguments.snapshot_seconds > 0, f"--snapshot-seconds must be above 0, got {arguments.snapshot_seconds}")
    place = Place(arguments.bind, arguments.port, arguments.snapshots, arguments.snapshot_seconds, keys)
    with stop_on_signals() as stop:
        return run_server(_tables(arguments.table), place, stop, _say_ready if arguments.ready else lambda: None)


def _tables(name: str) -> list[TableSettings]:
    if name != "-":
        return read_tables(Path(name))
    try:
        return [from_dict(saved) for saved in json.load(sys.stdin)]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"standard input has no tables: {error}") from error


def _say_ready() -> None:
    print("ready", flush=True)


def _keys(arguments: argparse.Namespace) -> int:
    try:
        create_keys(arguments.folder)
    except OSError as error:
        raise UsageError(f"cannot create {arguments.folder}: {error.strerror}", "choose a new folder") from error
    print(f"{arguments.folder}: give each client server.key and the two files of its role, and nobody else the rest")
    return FINISHED


def _status(arguments: argparse.Namespace) -> int:
    with Client(arguments.host, arguments.port, keys=arguments.keys, role=arguments.role) as client:
        status = msgspec.to_builtins(client.status())
    status.pop("session")
    if arguments.json:
        print(json.dumps(status, indent=2))
    elif arguments.prometheus:
        print("\n".join(prometheus(status)))
    else:
        for name, table in status["tables"].items():
            print(f"{name}: {_describe(table)}")
    return FINISHED


def _describe(table: dict[str, Any]) -> str:
    replay = table["replay"]
    if replay is None:
        return "starting"
    parts = [
        f"{replay['size']:,} of {table['capacity']:,} items",
        f"{replay['bytes'] / 1e6:,.1f} of {replay['max_bytes'] / 1e6:,.1f} MB",
        f"{replay['inserts_per_second']:,.0f} inserted/s by {table['writers']} writers",
        f"{replay['samples_per_second']:,.0f} drawn/s by {table['samplers']} samplers",
    ]
    return ", ".join([*parts, *(f"{count} refused: {reason}" for reason, count in replay["refusals"].items())])


def prometheus(status: dict[str, Any]) -> list[str]:
    """Returns the numbers of a status in the text format of Prometheus, one for each table and name."""
    lines: dict[str, list[str]] = {}
    for name, table in status["tables"].items():
        figures = {**(table["replay"] or {}), **{key: table[key] for key in ("capacity", "writers", "samplers")}}
        for key, value in figures.items():
            if isinstance(value, int | float):
                lines.setdefault(key, []).append(f'apexreplay_{key}{{table="{name}"}} {float(value)!r}')
    return [line for key, each in sorted(lines.items()) for line in (f"# TYPE apexreplay_{key} gauge", *each)]
