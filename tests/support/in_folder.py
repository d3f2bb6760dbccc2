"""`apex` in another folder, for copies of a program that has imported torch: they begin in the folder of that one."""

from __future__ import annotations

import os
import sys

from apex import cli


def main() -> int:
    """Runs `apex ARGUMENT...` in FOLDER; the command line is FOLDER ARGUMENT..."""
    folder, *arguments = sys.argv[1:]
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` does
    return cli.main(arguments)
