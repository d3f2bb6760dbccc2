"""Finds the learner of the newest run that is running on this host, for programs that get no address."""

import sys
from argparse import Namespace

from apex.errors import UsageError
from apex.runs.folder import RunFolder, list_runs
from apex.runs.lock import is_held
from apex.transport.hello import Route, local_host, read_route


def find_route(arguments: Namespace, folder: str = "runs") -> Route:
    """Returns the route of the options (see `add_route_options`); without --learner, that of the newest live run.

    Prints that run's path to standard error. Raises UsageError if no run below `folder` is running on this host.
    """
    if arguments.learner is not None:
        return read_route(arguments)
    run = next((RunFolder.open(path) for path in list_runs(folder) if is_held(path)), None)
    if run is None:
        raise UsageError(f"no run in {folder} is running on this host", "start one, or add --learner HOST")
    print(f"using the newest live run: {run.path}", file=sys.stderr)
    transport = run.config.transport
    found = {"learner": f"{local_host(transport)}:{transport.port('control')}"}
    return read_route(Namespace(**vars(arguments) | found | {"keys": arguments.keys or transport.keys}))
