"""The learner: trains on batches from the samplers, publishes parameters, sends new priorities to the replay servers.

`apex learner` also manages the run: it owns the run folder, the configuration, the control socket (in its coordinator
process) and the curves. Its address is the only one that all other programs need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from apex.learning.service import run_service
from apex.learning.setup import (
    open_run,
)
from apex.runs.lock import hold
from apex.runtime.lifecycle import (
    configure_logging,
    reports_errors,
    stop_on_signals,
)
from apex.runtime.watchdog import take_notifier
from apex.types import Role


@reports_errors("apex learner", logs_failures=True)
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex learner`: the composition root."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    configure_logging(Role.LEARNER)
    with stop_on_signals(take_notifier()) as stop:
        folder = open_run(arguments)
        with hold(folder.path, or_parent=True):  # The parent may be a launcher that holds the lock.
            return run_service(folder, stop)


if __name__ == "__main__":
    sys.exit(main())
