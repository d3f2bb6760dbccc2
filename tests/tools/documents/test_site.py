"""The documentation builds without a warning, and its reference lists every chart."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apex.runs.metrics.tensorboard_layout import LAYOUT

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_the_documentation_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--doctree-dir", str(tmp_path / "trees")]
    built = subprocess.run([*command, "docs", str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "html/reference/generated/settings.html").read_text()
    assert "learner.batch_size" in page
    page = (tmp_path / "html/reference/api.html").read_text()
    assert not set("\u2018\u2019\u201c\u201d") & set(page)  # Quotes are code.
    assert page.count('href="#apex.load_policy"') >= 3  # besides the list of contents
    assert "<cite>" not in page


def test_every_chart_of_tensorboard_has_a_row_in_the_reference():
    text = (ROOT / "docs/reference/curves.md").read_text()
    families = {found.rpartition("/")[0] for found in re.findall(r"`([\w/]+)`", text)}
    names = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", text)}
    for charts in LAYOUT.values():
        for tag in (tag for tags in charts.values() for tag in tags):
            family, _, name = tag.removesuffix("$").rpartition("/")
            assert family in families, tag
            assert any(each.startswith(name) for each in names), tag
