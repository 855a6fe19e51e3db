"""The words of the fictional world: syllables for names, pairs of words for values, and which of them are held out.

A name is a head and a tail syllable (``Mar`` + ``ta``), a value such as a trade is an adjective and a noun. One pair
in five is never shown in training. So every *token* is trained, while the held-out *names and values* are new to the
model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

__all__ = ["HEADS_AND_TAILS", "PLAIN_PAIRS", "Maker", "Split", "is_held_out"]

Split = Literal["train", "held_out"]
"""Half of the world that something is drawn from."""

# Heads end in a consonant and tails begin with one: then no merge of the tokenizer reaches over the border.
HEADS_AND_TAILS: dict[str, tuple[list[str], list[str]]] = {
    "first": (
        "Mar Tol Ked Sel Ban Dor Fen Gal Hir Jos Lum Nor Pel Rud Tam Vil Wen Yor Zan Cor Bel Dam Fil Gus".split(),
        "ta vin ro dik la mon sa ne fa lo min ka bo ris ma tus go len ni do".split(),
    ),
    "last": (
        "Har Kol Bren Dul Ser Mod Tav Fal Gor Hep Jun Lar Mus Nil Pos Rav Sim Tur Vod Wal Yan Zel Cad Bor".split(),
        "man sen dell win kins by rov ler tak mund pel zin ster nik gard vel low rin cott bert".split(),
    ),
    "town": (
        "Ash Bram Cran Dun Elm Fox Glen Hob Ips Kel Lab Mel Oak Pen Ros Stan Thim Ulm Wex Yar".split(),
        "bury ford wick port dale mouth stead field haven cliffe bridge gate".split(),
    ),
    "firm": (
        "Vec Qor Nex Tri Bol Sov Ard Cyn Dex Fyn Gryn Hex Jax Lyx Myl Opt Pyr Rux Syn Zyl".split(),
        "tron com dyne plex tech soft matic lux mark data nova wave".split(),
    ),
}
PLAIN_PAIRS: dict[str, tuple[list[str], list[str]]] = {
    "trade": (
        "glass wood stone silver paper leather copper wool clay gold linen boat clock bread".split(),
        "painter carver trader maker polisher seller dealer teacher designer buyer tester cutter smith planner".split(),
    ),
    "animal": (
        "grey black white brown spotted striped small large young lazy clever noisy".split(),
        "goat horse rabbit parrot turtle donkey cat dog sheep duck lizard goose pony hen".split(),
    ),
    "goods": (
        "folding wooden heavy plastic modern cheap garden kitchen round painted travel metal".split(),
        "lamps chairs tables bottles tents ladders pumps mirrors boxes shelves radios bicycles wheels ropes".split(),
    ),
}
_HELD_OUT_ONE_IN = 5


def is_held_out(head: int, tail: int) -> bool:
    """Return whether the pair of the `head`-th and the `tail`-th part is kept from training."""
    return (head + tail) % _HELD_OUT_ONE_IN == 0


class Maker:
    """Draws names and values of one split, never the same one twice in a context."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split = split
        self._used: set[str] = set()

    def person(self) -> str:
        """Return a new full name."""
        return self._fresh(lambda: f"{self._joined('first')} {self._joined('last')}")

    def value(self, kind: str) -> str:
        """Return a new value of a kind: ``person``, ``town``, ``firm``, ``trade``, ``animal`` or ``goods``."""
        if kind == "person":
            return self.person()
        if kind in PLAIN_PAIRS:
            return self._fresh(lambda: " ".join(self._pair(PLAIN_PAIRS[kind])))
        return self._fresh(lambda: self._joined(kind))

    def _joined(self, kind: str) -> str:
        return "".join(self._pair(HEADS_AND_TAILS[kind]))

    def _pair(self, parts: tuple[Sequence[str], Sequence[str]]) -> tuple[str, str]:
        heads, tails = parts
        while True:
            head, tail = self._rng.randrange(len(heads)), self._rng.randrange(len(tails))
            if is_held_out(head, tail) == (self._split == "held_out"):
                return heads[head], tails[tail]

    def _fresh(self, draw: Callable[[], str]) -> str:
        while True:
            candidate = draw()
            if candidate not in self._used:
                self._used.add(candidate)
                return candidate
