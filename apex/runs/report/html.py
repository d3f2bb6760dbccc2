"""HTML that nothing can break out of: every text becomes an element's content or an attribute, and is escaped there."""

from __future__ import annotations

from html import escape

_VOID = {"br", "col", "hr", "img", "link", "meta", "source"}  # These have no content, and no end.


class Markup(str):
    """Text that is HTML already. Only this module makes it of anything but its own literals."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """An element. `class_` stands for class, and a `_` within a name for -.

    True sets an attribute without a value; False and None leave it out.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not False and value is not None:
            words.append(f'{key}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start) if name in _VOID else Markup(f"{start}{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """The children one after the other; text among them is escaped, and shows what is not printable as a box."""
    return Markup("".join(child if isinstance(child, Markup) else escape(_printable(child)) for child in children))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{WHITE SQUARE}" for c in text)
