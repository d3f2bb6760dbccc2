"""Environment ids: which Atari game a name means, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

import gymnasium


def atari_game(name: str) -> str | None:
    """ALE's name of the game that `name` means ("ms_pacman"), or None where it means no Atari game.

    ALE/MsPacman-v5, MsPacmanNoFrameskip-v4, MsPacman-v4, MsPacman and ms_pacman mean the same. An environment of
    another maker goes first: Blackjack-v1 is Gymnasium's, ALE/Blackjack-v5 and blackjack are Atari's.
    """
    match = re.fullmatch(r"(ALE/)?(\w+?)(?:NoFrameskip|Deterministic)?(?:-v\d+)?", name)
    if match is None or (match[1] is None and match[2] in _other_names()):
        return None
    return _games().get(_plain(match[2]))


def _is_atari(spec: Any) -> bool:
    return str(spec.entry_point).startswith("ale_py")


@cache
def _games() -> dict[str, str]:
    """ALE's name of every game that one can play alone, by its plain name."""
    return {_plain(spec.name): spec.kwargs["game"] for spec in gymnasium.registry.values() if _is_atari(spec)}


def _other_names() -> set[str]:
    return {spec.name for spec in gymnasium.registry.values() if spec.namespace is None and not _is_atari(spec)}


def _plain(name: str) -> str:
    return re.sub(r"^ale/|-v\d+$|[^a-z0-9/]", "", name.lower())


def suggest(name: str) -> str:
    """What an unknown name may have meant, as the end of a sentence."""
    known = {_plain(i): i for i, spec in gymnasium.registry.items() if not _is_atari(spec) or spec.namespace == "ALE"}
    near = [known[plain] for plain in difflib.get_close_matches(_plain(name), known, n=3)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; it may be an Atari game (ALE/Pong-v5), any Gymnasium id, or package.module:factory"
