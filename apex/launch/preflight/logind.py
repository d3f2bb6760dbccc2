"""Detects whether a logout deletes the replay memory: with RemoveIPC=yes, systemd-logind removes /dev/shm files."""

import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

LAST_SYSTEM_USER = 999  # logind does not delete files of user ids up to this one
LINGER = Path("/var/lib/systemd/linger")  # has a file for each user who counts as permanently logged in
QUESTION = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "RemoveIPC"),
)
ANSWER_SECONDS = 3.0  # timeout of a request to logind


def find_affected(uid: int, linger: Path = LINGER, question: Sequence[str] = QUESTION) -> str:
    """Returns the user's name if logind deletes the user's files at the last logout; "" if not, or without logind."""
    try:
        user = pwd.getpwuid(uid).pw_name
        answer = subprocess.run(question, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (KeyError, OSError, subprocess.TimeoutExpired):  # A user without a name has never logged in.
        return ""
    removes = uid > LAST_SYSTEM_USER and answer.stdout.split() == ["b", "true"]
    return user if removes and not (linger / user).exists() else ""
