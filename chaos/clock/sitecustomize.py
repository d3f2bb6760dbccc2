"""Changes the wall clock of one program. Python imports this module at its start if the folder is in PYTHONPATH.

CHAOS_CLOCK names a file with one number: by how many seconds the wall clock differs from the true time. Only Python's
`time.time` and `time.time_ns` follow it, which all programs of a run use. The clock of the machine stays as it is.
"""

import mmap
import os
import time

if path := os.environ.get("CHAOS_CLOCK"):
    with open(path, "rb") as file:
        ahead = memoryview(mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)).cast("d")
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead[0]
    time.time_ns = lambda: nanoseconds() + int(1e9 * ahead[0])
