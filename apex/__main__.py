"""Runs the `apex` command for `python -m apex`."""

from apex.cli import run

if __name__ == "__main__":
    run()
