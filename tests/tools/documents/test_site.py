"""The site builds without a warning, is complete and fits its columns; its reference lists every chart."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from apex.runs.metrics.tensorboard_layout import LAYOUT

ROOT = Path(__file__).parents[3]
OUTSIDE = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")]
PAGES = [*OUTSIDE, *(path for path in (ROOT / "docs").rglob("*.md") if not {"generated", "_build"} & set(path.parts))]
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
COLUMN = 88  # characters of code in the column of a page
LOADS = {"script", "img", "video", "source", "link"}  # tags whose address a browser loads
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Shows every page in a frame of each width, and lists what is wider than its place.
MEASURE = """<body><script>
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border: 0; width: ${width}px; height: 900px`;
  const loaded = new Promise((resolve) => frame.onload = resolve);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const shown = frame.contentDocument, found = [];
  shown.querySelectorAll("details").forEach((each) => each.open = true);
  if (shown.documentElement.scrollWidth > width) found.push(`${page} at ${width} px: the page`);
  for (const block of shown.querySelectorAll("pre, table.docutils, .table-wrapper, article img, video")) {
    const place = block.closest("article").clientWidth + 8;  // A table has a margin of 3 px on each side.
    if (block.scrollWidth > block.clientWidth + 1 || block.clientWidth > place)
      found.push(`${page} at ${width} px: ${block.scrollWidth} px: ${block.textContent.slice(0, 60)}`);
  }
  frame.remove();
  return found;
}
(async () => {
  const wide = [];
  for (const width of [1280, 400]) for (const page of PAGES) wide.push(...await measure(page, width));
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(wide);
  document.body.replaceChildren(answer);
})();
</script></body>"""

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("site")]


class Page(HTMLParser):
    """The ids of a page, the addresses of its links, and the addresses that it loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = {name: value for name, value in attrs if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        addresses = [found[name] for name in ("href", "src", "poster") if name in found]
        (self.loads if tag in LOADS else self.links).extend(addresses)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--doctree-dir", str(folder / "trees")]
    built = subprocess.run([*command, "docs", str(folder / "html")], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_the_documentation_builds_without_a_warning(site):
    assert "learner.batch_size" in (site / "reference/generated/settings.html").read_text()
    page = (site / "reference/api.html").read_text()
    assert not set("\u2018\u2019\u201c\u201d") & set(page)  # Quotes are code.
    assert page.count('href="#apex.load_policy"') >= 3  # besides the list of contents
    assert "<cite>" not in page


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for address in [*page.links, *page.loads]:
            target = urlsplit(address)
            if target.scheme or target.netloc:
                continue
            there = (path.parent / unquote(target.path)).resolve() if target.path else path
            ids = pages[there].ids if there in pages else set()
            if not there.exists() or (target.fragment and there in pages and unquote(target.fragment) not in ids):
                dead.append(f"{path.relative_to(site)}: {address}")
    assert dead == []
    assert sum(len(page.links) for page in pages.values()) > 1_000


def test_no_page_loads_anything_from_another_host(site):
    loads = {address for path in site.rglob("*.html") for address in Page(path).loads}
    assert {address for address in loads if urlsplit(address).netloc} == set()
    assert any(address.partition("?")[0].endswith("searchtools.js") for address in loads)  # The search is local.


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_nothing_is_wider_than_its_column(site, tmp_path):
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    (site / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(pages), 1))
    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,1000"]
        command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=240000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=240)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        (site / "measure.html").unlink()
    answer = re.search(r'<pre id="answer">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert answer, shown.stdout[-2_000:] + shown.stderr[-2_000:]
    assert json.loads(html.unescape(answer[1])) == []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_no_code_line_is_longer_than_the_column_of_a_page():
    long = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in PAGES
        for language, block in BLOCK.findall(path.read_text())
        for line in block.splitlines()
        if len(line) > COLUMN and not language.startswith("{")  # a directive
    ]
    assert long == []


def test_the_drawings_are_those_of_their_descriptions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from drawings import DRAWINGS, PICTURES

    for name, draw in DRAWINGS.items():
        assert (PICTURES / f"{name}.svg").read_text() == draw(), f"{name}: run python docs/drawings.py"


def test_the_extra_docs_has_what_the_site_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["dev"])
    needed = re.findall(r"^(?:extensions|html_theme) = (.+)$", (ROOT / "docs/conf.py").read_text(), re.MULTILINE)
    names = {name.partition(".")[0] for name in re.findall(r'"([\w.]+)"', " ".join(needed))}
    assert names <= {re.split(r"[><=]", each)[0].replace("-", "_") for each in extras["docs"]}
    assert 'ensure_venv "$PWD" docs' in (ROOT / "docs/build.sh").read_text()


def test_every_chart_of_tensorboard_has_a_row_in_the_reference():
    text = (ROOT / "docs/reference/curves.md").read_text()
    families = {found.rpartition("/")[0] for found in re.findall(r"`([\w/]+)`", text)}
    names = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", text)}
    for charts in LAYOUT.values():
        for tag in (tag for tags in charts.values() for tag in tags):
            family, _, name = tag.removesuffix("$").rpartition("/")
            assert family in families, tag
            assert any(each.startswith(name) for each in names), tag
