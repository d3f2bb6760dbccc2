"""A command line's mistakes as one sentence, like every other mistake of a user."""

from __future__ import annotations

import argparse
from typing import NoReturn

from apex.errors import ConfigError


class PlainParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and end the program."""

    def error(self, message: str) -> NoReturn:
        """What is wrong, and where more is told."""
        raise ConfigError(f"{message}; {self.prog} --help tells more")
