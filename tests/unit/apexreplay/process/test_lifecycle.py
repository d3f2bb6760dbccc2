"""Programs stop on a signal, are interrupted by a second one, log their waits, and lose no exception of a thread."""

import os
import signal
import subprocess
import sys

import pytest

from apex.errors import StoppedError
from apexreplay.errors import UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import Helper, Stop, Wait, reports_errors, stop_on_signals


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_person_who_repeats_it_insists(signum):
    before = signal.getsignal(signum)
    with stop_on_signals() as stop:
        assert not stop.poll()
        os.kill(os.getpid(), signum)
        assert stop.poll()
        os.kill(os.getpid(), signal.SIGTERM)  # The kernel may send it once for each thread of a killed parent.
        with pytest.raises(KeyboardInterrupt, match="twice"):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize("ending", [0, StoppedError("before the run began"), 1, 75])
@pytest.mark.parametrize(("signum", "finished"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_program_that_finishes_after_ctrl_c_has_status_130(signum, finished, ending):
    @reports_errors("apex")
    def main(*signals):
        with stop_on_signals() as stop:
            for number in signals:
                os.kill(os.getpid(), number)
            assert stop.poll() == bool(signals)
        if isinstance(ending, StoppedError):
            raise ending
        return ending

    status = ending if isinstance(ending, int) else 0
    assert main(signum) == (status or finished)
    assert main() == status  # An earlier Ctrl-C in this process does not count.


@pytest.mark.parametrize(("before", "asks"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_requests_a_stop_unless_sighup_is_ignored(before, asks):
    previous = signal.signal(signal.SIGHUP, before)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.poll() == asks
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_wait_is_logged_after_ten_seconds_and_whenever_it_has_doubled(caplog):
    now = [0.0]
    wait = Wait("actor 3", clock=lambda: now[0])
    for second in range(45):
        now[0] = second
        wait.on(Waiting("receipts"))
    logged = [Waiting("receipts", who="actor 3", seconds=seconds) for seconds in (10.0, 20.0, 40.0)]
    assert [record.msg for record in caplog.records] == logged
    assert wait.waiting == Waiting("receipts", who="actor 3", seconds=44.0)
    assert all(word in str(wait.waiting) for word in ("actor 3", "receipts", "44"))
    wait.over()
    assert wait.waiting is None
    wait.on(Waiting("parameters"))
    assert wait.waiting == Waiting("parameters", who="actor 3", seconds=0.0)


def test_a_threads_exception_stops_its_role_and_is_raised_there():
    def fail():
        raise ValueError("on purpose")

    stop = Stop()
    helper = Helper("helper", fail, stop)
    helper.check()
    helper.start()
    helper.join(10.0)
    assert stop.poll()
    with pytest.raises(ValueError, match="on purpose"):
        helper.check()


def test_logs_name_the_role():
    program = (
        "import logging; from apex.runtime.logs import configure_logging; "
        "configure_logging('replay'); logging.getLogger('apex').info('ready')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.endswith(" replay INFO ready\n")


def test_a_sentence_cannot_control_the_terminal(capsys):
    @reports_errors("apex")
    def main():
        raise UsageError("made by \x1b]0;title\x07\x9b2J", "two\nlines, \u00e9")

    assert main() == 2
    assert capsys.readouterr().err == "apex: made by  ]0;title  2J; two\nlines, \u00e9\n"


def test_a_mistake_of_a_program_is_shown_as_it_is():
    @reports_errors("apex")
    def main():
        raise FileNotFoundError(2, "No such file")

    with pytest.raises(FileNotFoundError):
        main()
