"""What stored KV belongs to: a model and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from transformers import PreTrainedModel

from cacheblend_rag.model import model_fingerprint

__all__ = ["engine_identity"]


def engine_identity(model: PreTrainedModel, tokenizer: Any, *, private: bool) -> str:
    """Return a digest of a model and a tokenizer.

    Parameters
    ----------
    model : PreTrainedModel
        The model; all its weights are read.
    tokenizer : Any
        The tokenizer; its vocabulary and rules are read.
    private : bool
        Whether the store is seen by this engine alone. A random identity then does as well, and no weights need to be
        read.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    if private:
        return uuid.uuid4().hex
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{model_fingerprint(model)}|{rules}".encode(), digest_size=16).hexdigest()
