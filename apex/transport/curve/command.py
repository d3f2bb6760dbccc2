"""`apex keys`: makes the keys of a cluster, and lays out what one host needs of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from apex.config.arguments import Formatter, Parser
from apex.errors import ConfigError, require
from apex.runtime.lifecycle import FINISHED, reports_errors
from apex.transport.curve.key_store import PINNED, Keys, certificates, create_pair, lists_for, write_private
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
is then DIR/ROLE.NAME.key: copy that file to the learner's and the replay server's folders, where it counts within
seconds. To revoke a key remove its file there; its open connections are cut within seconds too.
The keys of learner and replay are pinned by all others: to change one, make a new folder.
"""


@reports_errors("apex keys")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root."""
    parser = Parser(
        prog="apex keys",
        description="Makes the keys without which no socket is opened beyond this host.",
        epilog=GUIDE,
        formatter_class=Formatter,
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
        bundle_for(arguments.folder, Role(arguments.role), arguments.out, arguments.name)
        files = ", ".join(sorted(path.name for path in arguments.out.iterdir()))
        print(f"made {arguments.out}: {files}; copy it with its modes, as scp -rp does")
        if arguments.name:
            path = arguments.folder / f"{arguments.role}.{arguments.name}.key"
            print(f"copy {path} to where learner and replay have theirs")
    return FINISHED


def new_folder(folder: Path) -> None:
    """Makes a folder with a key pair for every role."""
    _make(folder)
    for role in Role:
        create_pair(folder, role)


def bundle_for(folder: Path, role: Role, out: Path, name: str = "") -> None:
    """Makes `out` with what a host of this role needs; with a `name` it gets a key of its own."""
    require(not name or role not in PINNED, f"--name: all others expect the one key of the {role}, leave it out")
    require(re.fullmatch(r"[^/\s]*", name) is not None, f"--name must be a plain word, got {name!r}")
    Keys(folder, role)
    own = folder / f"{role}.{name}.key"
    require(not own.exists(), f"--name {name}: {own} is there already")
    _make(out)
    if name:
        create_pair(out, role)
        write_private(own, (out / f"{role}.key").read_text())
        (out / f"{role}.key").unlink()
    copied = [] if name else [folder / f"{role}.key_secret"]
    for path in [*copied, *(path for other in lists_for(role) for path in certificates(folder, other))]:
        write_private(out / path.name, path.read_text())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; keys are never overwritten") from error


if __name__ == "__main__":
    sys.exit(main())
