"""The evaluator: plays full games with the newest parameters at intervals during training."""

from collections.abc import Sequence

from apex.config.arguments import Parser
from apex.evaluation.service import run_service
from apex.runs.live import find_route
from apex.runtime.logs import configure_logging
from apex.runtime.trust import add_allow
from apex.transport.hello import add_route_options, greet
from apex.types import Role
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import end_process, reports_errors, stop_on_signals
from apexreplay.process.watchdog import take_notifier


@reports_errors("apex evaluator")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex evaluator`: the composition root."""
    parser = Parser(
        prog="apex evaluator", description="Starts an evaluator, which plays full games with the newest parameters."
    )
    add_route_options(parser)
    add_allow(parser)
    arguments = parser.parse_args(argv)
    configure_logging(Role.EVALUATOR)
    route = find_route(arguments)
    with stop_on_signals(take_notifier()) as stop:
        welcome = greet(route, Role.EVALUATOR, stop)
        return run_service(welcome, stop) if welcome is not None else FINISHED


if __name__ == "__main__":
    end_process(main())
