"""Preamble of every chunk: the beginning of a prompt such as it will be used in."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV

__all__ = ["TrainedPreamble", "default_preamble"]

_MARK = "\u2021content\u2021"

_DATE = re.compile(r"""strftime_now\(\s*["'](.+?)["']\s*\)""")
_ANY_DAY = datetime(2026, 1, 1)

_INSTRUCTION = "Use the following context to answer.\n\n"

_PASSAGE = (
    "The weather was mild that spring, and the road over the hills was dry by the end of March. In the mornings there was fog "
    "on the meadows, and the first carts came into town with their lamps still lit. Most of them brought vegetables and eggs; "
    "one had baskets, another only firewood.\n\n"
)


def default_preamble(tokenizer: Any) -> str:
    """Return the text that chunks are encoded after where the settings name none.

    A chunk's first tokens read as the beginning of a text when nothing stands before them: they become attention sinks, in
    every chunk of a prompt anew, and what follows is computed for a prompt of another kind than it is used in. So chunks
    are encoded after what a prompt most likely begins with: what the tokenizer's chat template writes before a user's
    words, if it has one, an instruction, and then a passage that has nothing to do with any question. APE (section 4)
    shares a prefix for the first of these reasons. docs/encoding.md has the figures. The text is the same on every day and
    every machine, since it is part of every key.
    """
    return f"{_opening(tokenizer)}{_INSTRUCTION}{_PASSAGE}"


def _opening(tokenizer: Any) -> str:
    """Return what a chat template writes before the words of a user; nothing where it cannot be told."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    try:
        text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    except Exception:  # a template may raise what it likes
        return ""
    before, mark, _ = text.partition(_MARK)
    # Many templates write today's date, and chunks are not to be encoded again tomorrow.
    today = datetime.now()
    for form in _DATE.findall(str(template)):
        before = before.replace(today.strftime(form), _ANY_DAY.strftime(form))
    return before if mark else ""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPreamble:
    """KV that takes the place of a preamble's own, since a model quotes better from chunks that are encoded after it.

    ``cacheblend-rag train-preamble`` makes it of a user's documents. KV Packet trains soft tokens around each chunk likewise.

    Attributes
    ----------
    token_ids : tuple of int
        The preamble that it replaces.
    kv : tuple of LayerKV
        ``(1, num_kv_heads, seq_len, head_dim)`` of each layer that has KV, float32, keys rotated for positions from 0.
    model : str
        Fingerprint of the weights that it was trained for.
    """

    token_ids: tuple[int, ...]
    kv: tuple[LayerKV, ...]
    model: str

    @property
    def digest(self) -> str:
        """Digest of the KV, a part of the key of every chunk that is encoded after it."""
        data = hashlib.blake2b(digest_size=16)
        for tensor in (part for layer in self.kv for part in layer):
            data.update(tensor.numpy().tobytes())
        return data.hexdigest()

    @classmethod
    def read(cls, path: Path, model: str) -> TrainedPreamble:
        """Read a file that was trained for the weights with the fingerprint `model`; otherwise `ConfigError`."""
        try:
            with safe_open(path, framework="pt") as file:
                trained_for, ids = (file.metadata() or {})["model"], file.get_tensor("token_ids")
                layers = [
                    LayerKV(*(file.get_tensor(f"{n}.{part}") for part in LayerKV._fields))
                    for n in range(len(file.keys()) // 2)
                ]
        except (OSError, SafetensorError, KeyError) as error:
            raise ConfigError(
                f"preamble {path} cannot be read: {error}; train one with cacheblend-rag train-preamble"
            ) from error
        if trained_for != model:
            raise ConfigError(
                f"preamble {path} was trained for other weights, or for these in another dtype; train one for this model"
            )
        return cls(tuple(ids.tolist()), tuple(layers), trained_for)

    def write(self, path: Path) -> None:
        """Write the file at once; `ConfigError` if that cannot be done."""
        tensors = {
            f"{n}.{part}": tensor.contiguous()
            for n, layer in enumerate(self.kv)
            for part, tensor in layer._asdict().items()
        }
        new = path.with_name(f".{path.name}.new")
        try:
            save_file(tensors | {"token_ids": torch.tensor(self.token_ids)}, new, {"model": self.model})
            new.replace(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"preamble {path} cannot be written: {error}") from error
