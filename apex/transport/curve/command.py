"""`apex keys`: makes the keys of a cluster, and lays out what one host needs of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from apex.errors import ConfigError, require
from apex.runtime.lifecycle import FINISHED, reports_errors
from apex.transport.curve.key_store import PINNED, Keys, lists_for, write_private
from apex.transport.sockets import new_key_pair
from apex.types import Role

GUIDE = """\
apex keys new keys                              on the machine that you trust most; it stays there
apex keys bundle keys --role actor actor-keys   what one kind of host needs, and no more

Copy each bundle to its host over a channel that you trust (scp -rp keeps the modes), and name it there:

  learner host    bundle --role learner     apex learner --transport.bind ADDRESS --transport.keys DIR
  replay host     bundle --role replay      apex replay --learner HOST --bind ADDRESS --keys DIR
  actor hosts     bundle --role actor       apex actor --learner HOST --keys DIR
  evaluator       bundle --role evaluator   apex evaluator --learner HOST --keys DIR
  a look from     bundle --role observer    apex status --learner HOST --keys DIR
  one host alone  the whole folder          apex train --transport.bind ADDRESS --transport.keys DIR

With --name each actor host, evaluator or observer gets a key of its own, which can be revoked alone. Its public half
is then in DIR/ROLE.public: copy that list to the learner's and the replay server's folders, where it counts within
seconds. To revoke a key remove its line from ROLE.public there; its open connections are cut within seconds too.
The keys of learner and replay are pinned by all others: to change one, make a new folder.

Revoke in the learner's and the replay server's folders: those are the ones that are asked.
"""


@reports_errors("apex keys")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root."""
    parser = argparse.ArgumentParser(
        prog="apex keys",
        description="Makes the keys without which no socket is opened beyond this host.",
        epilog=GUIDE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="a folder with a key for every role")
    new.add_argument("folder", type=Path, metavar="DIR", help="is made; must not be there")
    bundle = commands.add_parser("bundle", help="a folder with what one role needs")
    bundle.add_argument("folder", type=Path, metavar="DIR", help="made by apex keys new")
    bundle.add_argument("out", type=Path, metavar="OUT", help="is made; must not be there")
    bundle.add_argument("--role", required=True, choices=[str(role) for role in Role])
    bundle.add_argument("--name", default="", help="makes a key of its own for this host, to be revoked alone")
    arguments = parser.parse_args(argv)
    if arguments.command == "new":
        new_folder(arguments.folder)
        print(f"made {arguments.folder}: a key each for {', '.join(Role)}; apex keys --help says what goes where")
    else:
        bundle_for(arguments.folder, arguments.role, arguments.out, arguments.name)
        files = ", ".join(sorted(path.name for path in arguments.out.iterdir()))
        print(f"made {arguments.out}: {files}; copy it with its modes, as scp -rp does")
        if arguments.name:
            print(f"copy {arguments.folder / arguments.role}.public to where learner and replay have theirs")
    return FINISHED


def new_folder(folder: Path) -> None:
    """Makes a folder with a key pair for every role."""
    _make(folder)
    for role in Role:
        pair = new_key_pair()
        write_private(folder / f"{role}.secret", f"{pair.secret.hex()}\n")
        write_private(folder / f"{role}.public", f"{pair.public.hex()} {role}\n")


def bundle_for(folder: Path, role: str, out: Path, name: str = "") -> None:
    """Makes `out` with what a host of this role needs; with a `name` it gets a key of its own."""
    require(not name or role not in PINNED, f"--name: all others expect the one key of the {role}, leave it out")
    require(name.isprintable() and name == name.strip(), f"--name must be a plain word, got {name!r}")
    own = Keys(folder, role)
    taken = own.believed(role)
    require(name not in taken.values(), f"--name {name}: {folder / role}.public has one of this name already")
    _make(out)
    secret = own.secret
    if name:
        pair = new_key_pair()
        secret = pair.secret
        _append(folder / f"{role}.public", f"{pair.public.hex()} {name}\n")
    write_private(out / f"{role}.secret", f"{secret.hex()}\n")
    for other in lists_for(role):
        write_private(out / f"{other}.public", (folder / f"{other}.public").read_text())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; keys are never overwritten") from error


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
