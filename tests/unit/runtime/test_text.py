"""Short text for people."""

from apex.runtime.text import last_lines


def test_last_lines_are_the_newest_that_are_not_empty(tmp_path):
    path = tmp_path / "role.log"
    path.write_bytes(b"one\ntwo\n\n \nthr\xffee\n")
    assert last_lines(path, 2) == ["two", "thr\N{REPLACEMENT CHARACTER}ee"]
    assert last_lines(tmp_path / "none.log", 2) == []
