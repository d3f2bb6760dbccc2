"""`python -m apexreplay`."""

import sys

from apexreplay.cli import main

if __name__ == "__main__":
    sys.exit(main())
