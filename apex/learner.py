"""The learner: trains on batches from the samplers, publishes parameters, sends new priorities to the replay servers.

`apex learner` also manages the run: it owns the run folder, the configuration, the control socket (in its coordinator
process) and the curves. Its address is the only one that all other programs need.
"""

import sys
from collections.abc import Sequence

from apex.command_line import parse_config
from apex.config.arguments import Parser
from apex.environments.foreign import require_trust
from apex.environments.inspection import Inspector
from apex.learning.service import run_service
from apex.runs.folder import RunFolder
from apex.runs.lock import hold
from apex.runtime.hardware import read_machine
from apex.runtime.logs import configure_logging
from apex.runtime.trust import add_allow, remember
from apex.sizing import size_to_machine
from apex.types import Role
from apexreplay.errors import require
from apexreplay.process.lifecycle import reports_errors, stop_on_signals
from apexreplay.process.watchdog import take_notifier
from apexreplay.store.location import claim_run


@reports_errors("apex learner", logs_failures=True)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex learner`: the composition root."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    configure_logging(Role.LEARNER)
    with stop_on_signals(take_notifier()) as stop:
        folder = open_run(arguments, Inspector(stop))
        # The parent may be a launcher that holds the lock.
        with hold(folder.path, or_parent=True), claim_run(folder.run_id, folder.path):
            return run_service(folder, stop)


def open_run(arguments: list[str], inspector: Inspector) -> RunFolder:
    """Opens the run of `--run-folder`, which the launcher created; without it, creates a run from the other options."""
    parser = Parser(prog="apex learner", add_help=False)
    parser.add_argument("--run-folder", metavar="DIR", help="train the run in this folder; other settings are ignored")
    add_allow(parser)
    options, rest = parser.parse_known_args(arguments)
    if options.run_folder is not None:
        folder = RunFolder.open(options.run_folder)
        require_trust(folder.config)
        return folder
    about = "Starts a learner, which trains on the transitions that actors send."
    config = parse_config(rest, prog="apex learner", description=about, own=[parser], inspector=inspector)
    require(
        not config.run.single_process, "--single-process runs all roles in one process", remedy="use apex train instead"
    )
    require(not config.run.mirror, "run.mirror works with apex train only", remedy="use apex train --head")
    remember(require_trust(config))
    schema = inspector.schema(config)
    config = size_to_machine(config, read_machine(), schema).config
    inspector.try_algorithm(config, schema)
    return RunFolder.create(config, schema, argv=arguments)


if __name__ == "__main__":
    sys.exit(main())
