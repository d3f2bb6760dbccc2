"""Whether systemd-logind removes the replay memory of a user at logout."""

import os
import pwd

import pytest

from apex.launch.preflight.checks import check_logout
from apex.launch.preflight.logind import find_affected

USER = max(pwd.getpwall(), key=lambda user: user.pw_uid)  # a user above the system users, at least `nobody`
REMOVES = ("echo", "b true")


def test_a_user_whose_files_are_removed_is_warned(tmp_path):
    affected = find_affected(USER.pw_uid, tmp_path, REMOVES)
    assert affected == USER.pw_name
    check = check_logout(affected)
    assert check.verdict == "warning"
    assert affected in check.note
    assert f"loginctl enable-linger {affected}" in check.remedy


def test_a_lingering_user_is_not_affected(tmp_path):
    (tmp_path / USER.pw_name).touch()
    assert find_affected(USER.pw_uid, tmp_path, REMOVES) == ""
    assert check_logout("").verdict == "ok"


def test_a_system_user_is_not_affected(tmp_path):
    assert find_affected(0, tmp_path, REMOVES) == ""


@pytest.mark.parametrize("answer", [("echo", "b false"), ("false",), ("no-such-program",)])
def test_no_user_is_affected_if_logind_keeps_files_or_is_missing(tmp_path, answer):
    assert find_affected(USER.pw_uid, tmp_path, answer) == ""


def test_the_answer_of_this_host_is_understood():
    assert find_affected(os.geteuid()) in ("", pwd.getpwuid(os.geteuid()).pw_name)
