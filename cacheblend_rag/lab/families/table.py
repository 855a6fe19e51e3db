"""The table of families: a row each, exact or refused and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.lab.families.proof import prove
from cacheblend_rag.lab.families.tiny import tiny_config, tiny_model
from cacheblend_rag.model import capability

__all__ = ["FamilyRow", "families", "prove_family", "table_lines"]

_MOST_REASON = 300


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """What running a tiny random model of a family has shown.

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


def families() -> list[str]:
    """Return every family of causal language models that the installed transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def prove_family(family: str, tolerance: float = 2e-5) -> FamilyRow:
    """Build a tiny random model of a family and see whether blending is exact on it.

    Parameters
    ----------
    family : str
        One of `families`.
    tolerance : float
        How much logits, keys and values may differ from the model's own, over the largest of them.

    Returns
    -------
    FamilyRow
        The row.
    """
    try:
        model = tiny_model(tiny_config(family))
    except CacheBlendError:
        raise
    except Exception as error:
        why = f"transformers builds no small language model from its configuration: {error}"
        return FamilyRow(family, f"refused: {_short(why)}")
    proof = prove(model, tolerance)
    if proof.failed:
        return FamilyRow(family, f"wrong: {', '.join(proof.failed)}")
    if proof.refused is not None:
        return FamilyRow(family, f"refused: {_short(proof.refused)}")
    seen = capability(model)
    return FamilyRow(family, "exact", seen.attention, seen.positions)


def table_lines(rows: Sequence[FamilyRow]) -> list[str]:
    """Return the table as lines of Markdown."""
    lines = ["| family | verdict | attention of its layers | positions in their KV |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.family}`", row.verdict, row.attention, row.positions)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _short(reason: str) -> str:
    line = re.sub(r"\s+", " ", reason).strip()
    return line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 1] + "…"
