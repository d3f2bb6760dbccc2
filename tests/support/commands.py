"""Commands of users, in processes forked from one that has imported torch already, which takes 3 s of CPU time."""

import json
import os
import signal
import subprocess
import sys

import pytest

SERVER = """
import json, os, sys
import apex.evaluation.command, apex.launch.train, apex.learner
from apex.cli import run

for line in sys.stdin:
    folder, command, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path[0] = folder  # as python -m does
        for descriptor, path in enumerate([os.devnull, *outputs]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        if isinstance(command, str):
            sys.modules["__main__"] = type(sys)("__main__")
            exec(command, vars(sys.modules["__main__"]))
            sys.exit()
        sys.argv[:] = ["apex", *command]
        run()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Commands:
    """Runs commands and programs. Starts the process that forks when it is needed."""

    def __init__(self, folder):
        """`folder`: for the commands' outputs."""
        self._outputs = [folder / name for name in ("stdout", "stderr")]
        self._server = None

    def run(self, folder, command):
        """Runs `python -m apex COMMAND`, or `python -c COMMAND` if it is a text, in the folder to its end."""
        if self._server is None:
            # Programs that these start do not count for coverage: the server outlives the test that starts it.
            environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            program = [sys.executable, "-c", SERVER]
            self._server = subprocess.Popen(program, **pipes, env=environment, start_new_session=True)
        try:
            self._server.stdin.write(json.dumps([folder, command, self._outputs], default=str) + "\n")
            self._server.stdin.flush()
            status = int(self._server.stdout.readline())
        except BaseException:  # for example a test's timeout
            self.close()
            raise
        return subprocess.CompletedProcess(command, status, *(path.read_text() for path in self._outputs))

    def close(self):
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture
def type_apex(commands, tmp_path):
    """Returns a function that runs `apex ARGUMENTS` in the folder of the test; returns the errors and the output."""

    def type_apex(*arguments, status=0):
        ended = commands.run(tmp_path, arguments)
        assert ended.returncode == status, f"{arguments}: {ended.stdout}{ended.stderr}"
        return ended.stderr + ended.stdout

    return type_apex
