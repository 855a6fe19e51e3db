"""Tokenizer of a GGUF file, as transformers reads it, and as llama.cpp must agree with it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.constants import HF_HOME
from transformers import AutoTokenizer

from cacheblend_gguf.llama import Llama
from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["check_tokenizer", "read_tokenizer"]

_KEPT = Path(HF_HOME) / "cacheblend-gguf"
# What tokenizers differ in: blanks, letters beyond ASCII, digits, lines, pictures, control tokens.
_PROBES = ("The ferry leaves  at 12:05.\n\n\tNo. 3", "Ærø, žluť, 東京, \U0001f6a2", "<s></s><|im_start|>user\n", " a")


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file.

    Transformers takes 20 seconds to read one of 262,000 tokens out of its file, so what it makes of it is kept beside what was
    downloaded from the Hub.
    """
    status = path.stat()
    made_of = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{transformers.__version__}"
    kept = _KEPT / hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()
    # Whatever is wrong with it, the file has it too.
    with suppress(Exception):
        return AutoTokenizer.from_pretrained(str(kept), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # A disk that is full or not to be written costs time only.
    with suppress(OSError):
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as making:
            tokenizer.save_pretrained(f"{making}/made")
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(f"{making}/made", kept)
    return tokenizer


def check_tokenizer(llama: Llama, tokenizer: Any) -> None:
    """Raise `UnsupportedModelError` if a tokenizer makes other ids of texts than llama.cpp."""
    for text in _PROBES:
        ours, theirs = tokenizer(text, add_special_tokens=False)["input_ids"], llama.tokenize(text)
        if ours != theirs:
            raise UnsupportedModelError(
                f"transformers reads the tokenizer of {llama.path.name} differently from llama.cpp: of {text!r} it makes "
                f"{ours[:12]}, llama.cpp {theirs[:12]}; use another GGUF file of the model, or its folder in transformers"
            )
