"""Draws pictures of the documents as SVG from the descriptions below: `python docs/drawings.py` writes docs/pictures/.

Each picture has its own background, light or dark like the reader's system, so that it is legible on every page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
STYLE = """
.page { fill: #f8f9fb } .box { fill: #fff; stroke: #8b95a5 } .program { fill: #e3eefb; stroke: #4a7fb5 }
.memory { fill: #fdf1dc; stroke: #b98a2f } .bar { fill: #0072b2 } .peer { fill: #9aa3af }
text { fill: #1f2937; font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
.title { font-weight: 600; font-size: 14px } .label { fill: #4b5563 } .middle { text-anchor: middle }
.line { fill: none; stroke: #4b5563; stroke-width: 1.5 } .head { fill: #4b5563 }
@media (prefers-color-scheme: dark) {
.page { fill: #1a1d21 } .box { fill: #23272e; stroke: #768293 } .program { fill: #1d3046; stroke: #5b93cb }
.memory { fill: #3a2f17; stroke: #c79a45 } .bar { fill: #4aa3df } .peer { fill: #6b7480 }
text { fill: #e5e7eb } .label { fill: #b6bdc8 } .line { stroke: #b6bdc8 } .head { fill: #b6bdc8 }
}"""
HEAD = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
HEAD += '<path class="head" d="M0 0 8 4 0 8z"/></marker>'


class Box(NamedTuple):
    """A program, process or memory: a title, and lines below it."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "program"  # class in STYLE
    many: bool = False  # drawn as a pile

    def svg(self) -> str:
        """Returns the box and its text, centred."""
        shape = f'width="{self.width}" height="{self.height}" rx="6"'
        pile = (8, 4, 0) if self.many else (0,)
        parts = [f'<rect class="{self.kind}" x="{self.x + at}" y="{self.y - at}" {shape}/>' for at in pile]
        top = self.y + self.height / 2 - 9 * len(self.lines) + 5
        for number, line in enumerate((self.title, *self.lines)):
            style = "middle" if number or self.kind == "box" else "title middle"
            parts.append(text(self.x + self.width / 2, top + 18 * number, line, style))
        return "\n".join(parts)


class Arrow(NamedTuple):
    """A line through points, with a label at a place of its own."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    style: str = "label middle"
    has_head: bool = True

    def svg(self) -> str:
        """Returns the line and its label."""
        path = " ".join(f"{x},{y}" for x, y in self.points)
        line = f'<polyline class="line" points="{path}"{HEADED if self.has_head else ""}/>'
        return f"{line}\n{text(*self.at, self.label, self.style)}" if self.label else line


class Bars(NamedTuple):
    """A group of horizontal bars: a title, and a name, value and class for each."""

    y: int
    title: str
    values: tuple[tuple[str, float, str], ...]

    def svg(self) -> str:
        """Returns the bars, of which the longest has the full width."""
        parts, longest = [text(16, self.y, self.title, "title")], max(value for _, value, _ in self.values)
        for number, (name, value, kind) in enumerate(self.values):
            y, width = self.y + 14 + 26 * number, 440 * value / longest
            parts.append(text(16, y + 14, name, "label"))
            parts.append(f'<rect class="{kind}" x="170" y="{y}" width="{width:.1f}" height="18" rx="2"/>')
            parts.append(text(178 + width, y + 14, f"{value:,.4g}" if value < 1_000 else f"{value:,.0f}"))
        return "\n".join(parts)


HEADED = ' marker-end="url(#head)"'
LEFT, RIGHT = "label", "label right"


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Returns a line of text."""
    anchor = ' text-anchor="end"' if "right" in style else ""
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{anchor}>{escape(words)}</text>'


def picture(width: int, height: int, title: str, *parts: Box | Arrow | Bars) -> str:
    """Returns the SVG file; `title` describes it for readers who do not see it."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [f'{start} role="img">', f"<title>{escape(title)}</title>", f"<style>{STYLE}\n</style>", HEAD]
    lines.append(f'<rect class="page" width="{width}" height="{height}" rx="8"/>')
    return "\n".join([*lines, *(part.svg() for part in parts), "</svg>", ""])


def system() -> str:
    """The programs of a run and what they exchange."""
    return picture(
        *(480, 300, "Actors send transitions to the replay server, and the learner sends parameters to the actors"),
        Box(20, 30, 140, 84, "Actors", ("explore",), many=True),
        Box(312, 30, 148, 84, "Replay server", ("keeps transitions", "by priority"), "memory"),
        Box(312, 190, 148, 84, "Learner", ("trains the network",)),
        Box(20, 190, 140, 84, "Evaluator", ("plays full games", "and scores them")),
        Arrow(((170, 64), (306, 64)), "transitions", (238, 56)),
        Arrow(((346, 114), (346, 184)), "batches", (338, 140), RIGHT),
        Arrow(((424, 190), (424, 120)), "priorities", (416, 172), RIGHT),
        Arrow(((312, 212), (116, 120)), "parameters", (196, 184), RIGHT),
        Arrow(((312, 250), (166, 250)), "parameters", (238, 242)),
    )


def loop() -> str:
    """The way of a transition through the processes."""
    return picture(
        *(720, 272, "The loop: act, send, store, draw, learn, and return priorities and parameters"),
        Box(36, 162, 164, 76, "Actor worker", ("1  acts", "2  builds segments")),
        Box(36, 44, 164, 76, "Send window", ("3  keeps a segment", "until its receipt"), "memory"),
        Box(286, 44, 164, 76, "Replay server", ("4  checks and stores",)),
        Box(286, 162, 164, 76, "Store", ("frames, transitions,", "priorities"), "memory"),
        Box(536, 162, 164, 76, "Loaders", ("5  draw by priority", "and decode")),
        Box(536, 44, 164, 76, "Trainer", ("6  gradient step",)),
        Arrow(((118, 162), (118, 126)), "segment", (126, 147), LEFT),
        Arrow(((200, 70), (280, 70)), "segment", (240, 62)),
        Arrow(((286, 98), (206, 98)), "receipt", (246, 114)),
        Arrow(((368, 120), (368, 156)), "writes", (376, 144), LEFT),
        Arrow(((450, 200), (530, 200)), "copies", (490, 192)),
        Arrow(((618, 162), (618, 126)), "batch", (626, 147), LEFT),
        Arrow(((536, 82), (456, 82)), "priorities", (496, 74)),
        Arrow(((618, 44), (618, 24), (16, 24), (16, 200), (30, 200)), "parameters", (368, 18)),
    )


def processes() -> str:
    """The processes of a run on one machine; a line leads from parent to child."""
    programs = (
        ("apex replay", "writes the store", ("sampler-0 ...", "snapshots")),
        ("apex learner", "trains, saves", ("coordinator", "loader-0 ...")),
        ("apex evaluator", "plays full games", ()),
        ("apex actor", "host of the workers", ("actor-0 ...",)),
        ("tensorboard", "port 6006", ()),
    )
    parts: list[Box | Arrow] = [Box(250, 16, 220, 56, "apex train", ("launcher: supervisor, live view",))]
    for number, (name, line, children) in enumerate(programs):
        x = 8 + 142 * number
        parts.append(Arrow(((360, 72), (360, 96), (x + 68, 96), (x + 68, 120)), has_head=False))
        parts.append(Box(x, 120, 136, 60, name, (line,)))
        for place, child in enumerate(children):
            y = 198 + 48 * place
            parts.append(Arrow(((x + 14, 180), (x + 14, y + 18), (x + 28, y + 18)), has_head=False))
            parts.append(Box(x + 28, y, 108, 36, child, kind="box"))
    return picture(720, 298, "The launcher starts five programs, some of which fork processes", *parts)


def replay() -> str:
    """The rates of the replay server and of Reverb, from the record of one run."""
    figures = json.loads((DOCS / "results/cpu-replay-peers.json").read_text())["figures"]

    def bars(y: int, title: str, name: str, peer_name: str) -> Bars:
        ours, peer = figures[name], figures[peer_name]
        return Bars(y, title, (("Ape-X over ZeroMQ", ours, "bar"), ("Reverb", peer, "peer")))

    return picture(
        *(720, 208, "Rates of the replay server and of Reverb in one run on two cores"),
        bars(28, "Transitions stored per second", "direct_insert_transitions_per_s", "reverb_inserts_per_s"),
        bars(124, "Batches of 512 per second", "direct_sample_batches_per_s", "reverb_batches_per_s"),
    )


DRAWINGS = {"system": system, "loop": loop, "processes": processes, "replay-rates": replay}


def main() -> None:
    """Writes every picture."""
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
