"""`python -m apex` is `apex`."""

import sys

from apex.command_line import main

if __name__ == "__main__":
    sys.exit(main())
