"""The state of a sequence as llama.cpp writes it, taken apart into the KV of its tokens and put together again.

What goes to llama.cpp is always put together here, from tensors whose shapes are checked: stored bytes never reach its parser.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV

__all__ = ["StateForm", "join_state", "split_state"]

_Bytes: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"
_Side: TypeAlias = "tuple[Rows, _Bytes]"

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
    # Whether it keeps an element of the values of all tokens together, as it does without flash attention.
    is_turned: bool = False

    @property
    def layers(self) -> tuple[tuple[Rows, Rows], ...]:
        """All layers, in the order in which the state has them."""
        return tuple(layer for cache in self.caches for layer in cache)


class _Reader:
    """Reads a state from its beginning."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def take(self, form: str) -> tuple[int, ...]:
        """Return the next numbers, in a form of `struct`."""
        found = struct.unpack_from("<" + form, self._data, self._place)
        self._place += struct.calcsize("<" + form)
        return found

    def rows(self, count: int, nbytes: int, element: int | None = None) -> _Bytes:
        """Return the next rows, ``(count, nbytes)``, of which an element of all is kept together if its size is given."""
        found = np.frombuffer(self._data, np.uint8, count * nbytes, self._place)
        self._place += count * nbytes
        if element is not None:
            found = found.reshape(nbytes // element, count, element).swapaxes(0, 1)
        return found.reshape(count, nbytes)

    @property
    def has_more(self) -> bool:
        """Whether anything is left."""
        return self._place < len(self._data)


def split_state(data: bytes, first: int, count: int) -> tuple[StateForm, list[LayerKV]]:
    """Return the form of a sequence's state, and the KV of its tokens, ``(1, count, width)`` of each layer.

    `UnsupportedModelError` if the state is not of the tokens at `first` and the `count` - 1 after it, each in a cell of its own
    in every layer: that of a recurrent layer is not.
    """
    reader = _Reader(data)
    caches, layers = [], []
    try:
        magic, _ = reader.take("Ii")
        while reader.has_more:
            (streams,) = reader.take("I")
            (cells,) = reader.take("I")
            places = [reader.take("iIi")[:2] for _ in range(cells)]
            if streams != 1 or places != [(first + number, 1) for number in range(count)]:
                raise ValueError(f"{cells} cells in {streams} streams for {count} tokens")
            is_turned, num_layers = reader.take("II")
            keys: list[_Side] = []
            values: list[_Side] = []
            for side in (keys, values):
                for _ in range(num_layers):
                    if side is values and is_turned:
                        kind, element, width = reader.take("iII")
                        side.append((Rows(kind, width * element), reader.rows(count, width * element, element)))
                    else:
                        kind, nbytes = reader.take("iQ")
                        side.append((Rows(kind, nbytes), reader.rows(count, nbytes)))
            caches.append(tuple((key[0], value[0]) for key, value in zip(keys, values, strict=True)))
            layers += [LayerKV(_tensor(*key), _tensor(*value)) for key, value in zip(keys, values, strict=True)]
    except (struct.error, ValueError) as error:
        raise UnsupportedModelError(
            f"the state that this llama.cpp keeps of the model cannot be taken apart by token ({error}), so its chunks cannot be "
            "stored"
        ) from error
    return StateForm(tuple(caches), magic, bool(is_turned)), layers


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
    meta = np.empty((count, 3), "<i4")
    meta[:, 0], meta[:, 1], meta[:, 2] = np.arange(first, first + count), 1, 0
    at = 0
    for cache in form.caches:
        parts += [struct.pack("<II", 1, count), meta.tobytes(), struct.pack("<II", form.is_turned, len(cache))]
        for side in (0, 1):
            for number, rows in enumerate(cache):
                tensor, row = layers[at + number][side], rows[side]
                if side and form.is_turned:
                    parts.append(struct.pack("<iII", row.type, row.dtype.itemsize, row.width))
                    tensor = tensor[0].T
                else:
                    parts.append(struct.pack("<iQ", row.type, row.nbytes))
                # Flat first: of a dimension of one row any stride counts as contiguous.
                parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        at += len(cache)
    return b"".join(parts)


def _tensor(rows: Rows, data: _Bytes) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(rows.dtype)[None]
