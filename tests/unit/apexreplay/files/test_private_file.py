"""A folder in a place that every user can write belongs to one user, whatever others put there first."""

import os
import stat

import pytest
from support.users import STRANGER, needs_root

from apexreplay.errors import DataError, ForeignFileError
from apexreplay.files.private_file import private_folder


@pytest.fixture
def root(tmp_path):
    tmp_path.chmod(0o1777)
    return tmp_path


def test_a_private_folder_is_made_once(root):
    folder = private_folder(root, "apex-7")
    assert folder == root / "apex-7"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(root, "apex-7") == folder
    assert private_folder(root, "apex-77") != folder


PLANTS = {
    "folder": os.mkdir,
    "file": lambda path: path.touch(),
    "pipe": os.mkfifo,
    "link to a folder": lambda path: path.symlink_to("elsewhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@needs_root
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_name_that_others_took_leads_to_another_folder(root, plant):
    (root / "elsewhere").mkdir(0o700)
    for name in ("apex-7", "apex-7-first"):
        plant(root / name)
        os.chown(root / name, STRANGER, STRANGER, follow_symlinks=False)
    folder = private_folder(root, "apex-7")
    assert folder.parent == root
    assert folder.name.startswith("apex-7-")
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (os.geteuid(), 0o700)
    (root / "apex-7").rename(root / "gone")  # The other user gives the name back: nothing may be lost by it.
    assert private_folder(root, "apex-7") == folder


def test_a_folder_that_others_can_access_is_refused(root):
    private_folder(root, "apex-7").chmod(0o755)
    with pytest.raises(ForeignFileError, match=r"apex-7.* 755") as refused:
        private_folder(root, "apex-7")
    assert str(root / "apex-7") in refused.value.remedy


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(DataError, match="none") as refused:
        private_folder(tmp_path / "none", "apex-7")
    assert refused.value.remedy
