"""`apex keys`: creates the keys of a cluster, and bundles with only the keys that hosts of one role need."""

import re
from collections.abc import Sequence
from pathlib import Path

from apex.config.arguments import Formatter, Parser
from apex.transport.curve.key_store import PINNED, Keys, lists_for
from apex.types import Role
from apexreplay.errors import FINISHED, UsageError, require
from apexreplay.process.lifecycle import reports_errors
from apexreplay.transport.curve.key_store import certificates, create_pair, removed_if_unfinished, write_private

GUIDE = """\
apex keys new keys                              on the machine that you trust most; keep the folder there
apex keys bundle keys --role actor actor-keys   only the keys that a host of this role needs

Copy each bundle to its host over a trusted channel (scp -rp keeps the file modes). There, pass its folder as DIR:

  learner host    bundle --role learner     apex learner --transport.bind ADDRESS --transport.keys DIR
  replay host     bundle --role replay      apex replay --learner HOST --bind ADDRESS --keys DIR
  actor hosts     bundle --role actor       apex actor --learner HOST --keys DIR
  evaluator       bundle --role evaluator   apex evaluator --learner HOST --keys DIR
  observer        bundle --role observer    apex status --learner HOST --keys DIR
  single host     the whole folder          apex train --transport.bind ADDRESS --transport.keys DIR

With --name, an actor host, evaluator or observer gets a separate key, which you can revoke separately. Copy its public
key, DIR/ROLE.NAME.key, to the key folders of the learner and the replay server. The key is accepted within seconds. To
revoke the key, delete the file there; connections with this key are closed within seconds.
The learner and the replay server each have one key, which the other roles expect: to change it, create a new folder.
"""


@reports_errors("apex keys")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex keys` with these arguments; returns its exit status."""
    about = "Creates the keys that encrypt and authenticate connections between hosts."
    parser = Parser(prog="apex keys", description=about, epilog=GUIDE, formatter_class=Formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="create a folder with a key pair for every role")
    new.add_argument("folder", type=Path, metavar="DIR", help="folder to create; must not exist yet")
    bundle = commands.add_parser("bundle", help="create a folder with the keys that one role needs")
    bundle.add_argument("folder", type=Path, metavar="DIR", help="folder created by apex keys new")
    bundle.add_argument("out", type=Path, metavar="OUT", help="folder to create; must not exist yet")
    bundle.add_argument("--role", required=True, choices=[str(role) for role in Role])
    bundle.add_argument("--name", default="", help="name of the host, which then gets a key that can be revoked alone")
    arguments = parser.parse_args(argv)
    if arguments.command == "new":
        new_folder(arguments.folder)
        print(f"created {arguments.folder} with keys for {', '.join(Role)}; next: apex keys --help")
    else:
        bundle_for(arguments.folder, Role(arguments.role), arguments.out, arguments.name)
        files = ", ".join(sorted(path.name for path in arguments.out.iterdir()))
        print(f"created {arguments.out}: {files}; copy this folder with scp -rp, which keeps the file modes")
        if arguments.name:
            path = arguments.folder / f"{arguments.role}.{arguments.name}.key"
            print(f"copy {path} to the key folders of the learner and the replay server")
    return FINISHED


def new_folder(folder: Path) -> None:
    """Creates a folder with a key pair for every role."""
    _make(folder)
    with removed_if_unfinished(folder):
        for role in Role:
            create_pair(folder, role)


def bundle_for(folder: Path, role: Role, out: Path, name: str = "") -> None:
    """Creates `out` with the keys that a host of this role needs. With a `name` the host gets a separate key."""
    require(not name or role not in PINNED, f"--name cannot be used with --role {role}: this role has only one key")
    is_plain = re.fullmatch(r"[^/\s]*", name) is not None
    require(is_plain, f"--name must be a plain word without / or spaces, got {name!r}")
    Keys(folder, role)
    own = folder / f"{role}.{name}.key"
    require(not own.exists(), f"--name {name}: {own} exists already", remedy="choose another name")
    _make(out)
    with removed_if_unfinished(out):
        copied = [] if name else [folder / f"{role}.key_secret"]
        for path in [*copied, *(path for other in lists_for(role) for path in certificates(folder, other))]:
            write_private(out / path.name, path.read_text())
        if name:
            create_pair(out, role)
            write_private(own, (out / f"{role}.key").read_text())
            (out / f"{role}.key").unlink()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        remedy = "choose a new folder, because keys are never overwritten"
        raise UsageError(f"cannot create {folder}: {error.strerror}", remedy) from error
