"""The documentation site: Sphinx with MyST and furo. `./docs/build.sh` builds it strictly into docs/_build."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from docutils import nodes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

from generate import rewrite_links, write_pages  # noqa: E402  after the path

from apex.version import VERSION  # noqa: E402

project = "Ape-X over ZeroMQ"
author = copyright = "the authors of Ape-X over ZeroMQ"
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build", "results", "reference/generated/timing.md"]  # protocol.md includes the last
html_theme = "furo"
html_title = f"{project} {VERSION}"
html_static_path = ["pictures"]
html_css_files = ["site.css"]
templates_path: list[str] = []
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ "
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
smartquotes = False  # Quotes in docstrings are code.
default_role = "py:obj"  # `name` in a docstring is code, and a link if this reference has the name.
LONG_NAME = 20  # characters of a code name that stays in one piece


def relink(app: object, name: str, source: list[str]) -> None:
    """Shows a link to a file that is no page of the site as its path: such files are in the repository only."""
    source[0] = rewrite_links(source[0], (DOCS / name).parent, name)


def keep_symbols(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Shows symbols in docstrings, such as [B, *F] and |TD error|, as they are."""
    lines[:] = [re.sub(r"([*|])", r"\\\1", line) for line in lines]


def let_long_names_break(app: object, document: nodes.document) -> None:
    """Lets a browser break a long path or setting after a slash or dot, so that tables are not wider than the page."""
    for literal in document.findall(nodes.literal):
        if len(literal.astext()) > LONG_NAME and len(literal.children) == 1:
            # An extension stays with its name; a long name of a test breaks after an underscore too.
            pieces = re.split(r"(?<=/)(?=.)|(?<=\.)(?=\w{5})|(?<=_)(?=\w{24})", literal.astext())
            literal.children.clear()
            for number, piece in enumerate(pieces):
                literal += [nodes.raw("", "<wbr>", format="html")] * bool(number)
                literal += nodes.Text(piece)


def copy_images(app, error: Exception | None) -> None:  # type: ignore[no-untyped-def]
    """Copies the films, which pages name in HTML."""
    if error is None:
        shutil.copytree(DOCS / "images", Path(app.outdir) / "images", dirs_exist_ok=True)


def setup(app) -> None:  # type: ignore[no-untyped-def]
    """What Sphinx calls first."""
    write_pages()
    app.connect("source-read", relink)
    app.connect("autodoc-process-docstring", keep_symbols)
    app.connect("doctree-read", let_long_names_break)
    app.connect("build-finished", copy_images)
