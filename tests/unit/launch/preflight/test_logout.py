"""Who loses the replay memory at a logout, by what systemd-logind says, and what `apex doctor` makes of it."""

from __future__ import annotations

import os
import pwd

import pytest

from apex.launch.preflight.checks import check_logout
from apex.runtime.logind import find_affected

USER = max(pwd.getpwall(), key=lambda user: user.pw_uid)  # no system user: nobody, at least
REMOVES = ("echo", "b true")


def test_a_user_whose_files_go_with_the_last_session_is_warned_with_the_remedy(tmp_path):
    affected = find_affected(USER.pw_uid, tmp_path, REMOVES)
    assert affected == USER.pw_name
    check = check_logout(affected)
    assert check.verdict == "warning"
    assert f"last session of {affected} ends (RemoveIPC=yes)" in check.figures
    assert f"loginctl enable-linger {affected}" in check.remedy


def test_a_user_who_lingers_is_not(tmp_path):
    (tmp_path / USER.pw_name).touch()
    assert find_affected(USER.pw_uid, tmp_path, REMOVES) == ""
    assert check_logout("").verdict == "ok"


def test_a_system_user_is_not(tmp_path):
    assert find_affected(0, tmp_path, REMOVES) == ""


@pytest.mark.parametrize("answer", [("echo", "b false"), ("false",), ("no-such-program",)])
def test_where_logind_spares_all_or_does_not_run_nobody_is(tmp_path, answer):
    assert find_affected(USER.pw_uid, tmp_path, answer) == ""


def test_what_this_host_says_is_understood_or_passed_over():
    assert find_affected(os.geteuid()) in ("", pwd.getpwuid(os.geteuid()).pw_name)
