"""Programs and commands of runs, for every test of whole runs."""

from support.commands import commands, type_apex
from support.programs import offset, programs

__all__ = ["commands", "offset", "programs", "type_apex"]
