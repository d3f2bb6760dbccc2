"""An environment with which a learner crashes at each start: it kills the program that tries it in a child process."""

import os
import signal


def make() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
