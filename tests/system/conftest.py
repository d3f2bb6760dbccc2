"""Programs of a run, for every test of whole runs."""

from support.programs import fork_server, offset, programs

__all__ = ["fork_server", "offset", "programs"]
