"""The words of a GGUF file, as llama.cpp reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["Vocabulary"]

_NAME_BYTES = 64


class Vocabulary:
    """The tokens of a model that llama.cpp has loaded; its length is how many there are.

    Attributes
    ----------
    path : Path
        The file.
    pre : str
        The file's name of how text is split into words; empty where it has none.
    end_ids : tuple of int
        The tokens that end an answer.

    Raises
    ------
    UnsupportedModelError
        If the file has no tokenizer.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self.path = path
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        # llama.cpp ends the process where it is asked for tokens of such a file.
        if llama_cpp.llama_vocab_type(self._vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise UnsupportedModelError(f"{path.name} has no tokenizer; use another GGUF file of the model")
        name = ctypes.create_string_buffer(_NAME_BYTES)
        llama_cpp.llama_model_meta_val_str(model, b"tokenizer.ggml.pre", name, len(name))
        self.pre = name.value.decode()
        self._count = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self.end_ids = tuple(id for id in range(self._count) if llama_cpp.llama_vocab_is_eog(self._vocab, id))

    def __len__(self) -> int:
        return self._count

    def words(self) -> Iterator[tuple[str, int]]:
        """Yield the text and the attributes of each token, in order."""
        for id in range(self._count):
            text = llama_cpp.llama_vocab_get_text(self._vocab, id)
            yield text.decode(errors="replace"), int(llama_cpp.llama_vocab_get_attr(self._vocab, id))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids that llama.cpp makes of a text in which nothing is a control token."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, False)
        return list(ids[:count])
