"""Runs the `apex` command for `python -m apex`."""

import sys

from apex.cli import main

if __name__ == "__main__":
    sys.exit(main())
