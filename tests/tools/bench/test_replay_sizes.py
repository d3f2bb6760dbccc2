"""The chart of draw and update by size refuses a file that it cannot write."""

import pytest

from apexreplay.errors import UsageError
from bench.plots.replay_sizes import check_picture


@pytest.mark.parametrize("name", ["sizes.jpg", "none/sizes.png"])
def test_an_unwritable_file_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"--sizes"):
        check_picture(tmp_path / name)
