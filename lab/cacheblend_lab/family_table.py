"""The table of families: exact or refused and why, as it was when this version was made; and by kind, as Markdown.

Nothing here imports torch, so that the table is shown at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHIPPED", "FamilyRow", "shipped_table", "table_lines"]

SHIPPED = Path(__file__).with_suffix(".json")
"""The file of the table, which tests/model/test_families.py writes."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """Findings of running a tiny random model of a family.

    Attributes
    ----------
    family : str
        As transformers names it.
    verdict : str
        "exact", or "refused: " and the reason; "wrong: " and what differs would be a bug.
    attention : str
        The kinds of attention of its layers; empty where it is refused.
    positions : str
        What their KV owes to the position; empty where it is refused.
    """

    family: str
    verdict: str
    attention: str = ""
    positions: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether blending is exact."""
        return self.verdict == "exact"

    @property
    def kind(self) -> str:
        """What blending does with the family, in the words that it shares with others."""
        if self.is_exact:
            return "exact, at the position of encoding only" if "fixed" in self.positions else "exact"
        # Without the name of its class, sizes, types of layers and what was raised.
        reason = re.sub(r"^layer \d+: |[:;] .*| \(.*", "", self.verdict.split(maxsplit=2)[2])
        return "refused: " + re.sub(r" of type [\w, ]+,(?= which)|(?<= of) \d+", "", reason)


def shipped_table() -> tuple[str, list[FamilyRow]]:
    """Return the version of transformers that the shipped table was made with, and its rows."""
    whole = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return whole["transformers"], [FamilyRow(**row) for row in whole["rows"]]


def table_lines(rows: Sequence[FamilyRow]) -> list[str]:
    """Return the families by kind, most first, as lines of Markdown."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(f"`{row.family}`")
    lines = [f"| {kind} | {', '.join(kinds[kind])} |" for kind in sorted(kinds, key=lambda kind: -len(kinds[kind]))]
    return ["| verdict | families |", "|---|---|", *lines]
