"""The state of a sequence as llama.cpp writes it, taken apart into the KV of its tokens and put together again.

What goes to llama.cpp is always put together here, from tensors whose shapes are checked: stored bytes never reach its parser.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV

__all__ = ["Rows", "StateForm", "join_state", "split_state"]

# ggml's numbers of the types that a cell can have, and torch's where it has them. Of others a row is bytes.
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Rows:
    """The keys or the values of a token in one layer: ggml's number of their type, and their bytes."""

    type: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor that holds them."""
        return _DTYPES.get(self.type, torch.uint8)

    @property
    def width(self) -> int:
        """Elements of such a tensor."""
        return self.nbytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of a model's state: of each cache (one, or one of full and one of sliding layers) its layers' keys and values."""

    caches: tuple[tuple[tuple[Rows, Rows], ...], ...]
    # llama.cpp's mark of the version in which it writes states.
    magic: int = 0

    @property
    def layers(self) -> tuple[tuple[Rows, Rows], ...]:
        """All layers, in the order in which the state has them."""
        return tuple(layer for cache in self.caches for layer in cache)


def split_state(data: bytes, first: int, count: int) -> tuple[StateForm, list[LayerKV]]:
    """Return the form of a sequence's state, and the KV of its tokens, ``(1, count, width)`` of each layer.

    `UnsupportedModelError` if the state is not of the tokens at `first` and the `count` - 1 after it, each in a cell of its own
    in every layer: that of a recurrent layer is not.
    """
    place, caches, layers = 0, [], []

    def take(form: str) -> Any:
        nonlocal place
        begin, place = place, place + struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, data, begin)

    def take_rows(order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Rows, torch.Tensor]:
        nonlocal place
        rows = Rows(*take("iQ"))
        begin, place = place, place + count * rows.nbytes
        found = np.frombuffer(data, np.uint8, count * rows.nbytes, begin).reshape(count, rows.nbytes)
        # In the order of their positions.
        return rows, torch.from_numpy(found[order]).view(rows.dtype)[None]

    try:
        magic, _ = take("Ii")
        while place < len(data):
            streams, cells = take("II")
            places = [take("iIi")[:2] for _ in range(cells)]
            # Tokens lie in whatever cells were free.
            order = np.argsort([position for position, _ in places])
            if streams != 1 or sorted(places) != [(first + number, 1) for number in range(count)]:
                raise ValueError(f"{cells} cells in {streams} streams for {count} tokens")
            is_turned, num_layers = take("II")
            if is_turned:
                raise ValueError("it keeps an element of all values together")
            keys, values = ([take_rows(order) for _ in range(num_layers)] for _ in ("keys", "values"))
            both = list(zip(keys, values, strict=True))
            caches.append(tuple((key[0], value[0]) for key, value in both))
            layers += [LayerKV(key[1], value[1]) for key, value in both]
    except (struct.error, ValueError) as error:
        raise UnsupportedModelError(
            f"the state that this llama.cpp keeps of the model cannot be taken apart by token ({error}), so its chunks cannot be "
            "stored"
        ) from error
    return StateForm(tuple(caches), magic), layers


def join_state(form: StateForm, layers: Sequence[LayerKV], first: int) -> bytes:
    """Return the state of a sequence whose tokens stand at `first` and after it; the opposite of `split_state`.

    `ValueError` if the layers, ``(1, tokens, width)``, are not of that form.
    """
    count = layers[0].keys.shape[1] if layers else 0
    wanted = form.layers
    if len(layers) != len(wanted) or not count:
        raise ValueError(f"{len(layers)} layers of {count} tokens are not the {len(wanted)} of the model")
    for rows, layer in zip(wanted, layers, strict=True):
        for row, tensor in zip(rows, layer, strict=True):
            if tensor.dtype != row.dtype or tensor.shape != (1, count, row.width):
                raise ValueError(f"KV of shape {tuple(tensor.shape)} and {tensor.dtype} is not of the model")
    parts: list[bytes] = [struct.pack("<Ii", form.magic, 0)]
    meta = b"".join(struct.pack("<iIi", first + number, 1, 0) for number in range(count))
    at = 0
    for cache in form.caches:
        parts += [struct.pack("<II", 1, count), meta, struct.pack("<II", 0, len(cache))]
        for side in (0, 1):
            for rows, layer in zip(cache, layers[at : at + len(cache)], strict=True):
                parts.append(struct.pack("<iQ", rows[side].type, rows[side].nbytes))
                # Flat first: of a dimension of one row any stride counts as contiguous.
                parts.append(layer[side].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        at += len(cache)
    return b"".join(parts)
