"""Processes by their ids."""


def is_running(pid):
    """Returns whether the process is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
