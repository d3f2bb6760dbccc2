"""Finds the learner of a run that this user runs on this host, and the keys that its programs need."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator

from apex.config import Config
from apex.runs.folder import RunFolder, list_runs
from apex.runs.lock import is_held
from apex.transport.hello import Route, local_host, split_address
from apexreplay.errors import UsageError

log = logging.getLogger("apex")


def find_route(arguments: Namespace, folder: str = "runs") -> Route:
    """Returns the route of the options of `add_route_options`; without --learner, that of the newest live run.

    Without --keys, the route has the keys of the live run whose learner it leads to, if that is on this host. Prints
    the path of a run that no option names, and logs the learner's address. Raises UsageError for an invalid address,
    and without --learner if no run below `folder` is live.
    """
    runs = _live_runs(folder)
    if arguments.learner is None:
        if (run := next(runs, None)) is None:
            raise UsageError(f"no run in {folder} is running on this host", "start one, or add --learner HOST")
        print(f"using the newest live run: {run.path}", file=sys.stderr)
        route = found = _route_to(run)
    else:
        route = Route(*split_address(arguments.learner, Config().transport.control_port))
        address = "127.0.0.1" if route.host == "localhost" else route.host, route.port
        found = next((each for each in map(_route_to, runs) if (each.host, each.port) == address), route)
    log.info("starting; joins the run of the learner at %s", route.endpoint)
    keys = arguments.keys or ("" if arguments.insecure_no_auth else found.keys)
    return route._replace(keys=keys, insecure_no_auth=arguments.insecure_no_auth)


def _live_runs(folder: str) -> Iterator[RunFolder]:
    """Yields the runs of this user that are running on this host, the newest first.

    Ignores runs of other users, because a learner whose key is known is trusted, and runs of other versions.
    """
    for path in list_runs(folder):
        if path.stat().st_uid != os.geteuid() or not is_held(path):
            continue
        try:
            yield RunFolder.open(path)
        except UsageError:
            continue


def _route_to(run: RunFolder) -> Route:
    transport = run.config.transport
    return Route(local_host(transport), transport.port("control"), run.keys)
