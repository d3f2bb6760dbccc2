"""Programs of a run, for every test of whole runs."""

from support.programs import offset, programs

__all__ = ["offset", "programs"]
