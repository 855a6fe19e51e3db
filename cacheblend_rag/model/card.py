"""Card of a model that is elsewhere: what must be known to move its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend_rag.model.decoder import Decoder
from cacheblend_rag.rope import Rotation

__all__ = ["ModelCard"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ModelCard:
    """Form of a model's KV, for a process that serves the same weights in another way."""

    # Digest of the model's weights and its tokenizer, which is part of every key.
    identity: str
    # Maximum tokens that it can read and write; None if its configuration does not say.
    window: int | None
    dtype: torch.dtype
    # For each layer the number of KV heads, and the size of a head of keys and of values.
    shapes: tuple[tuple[int, int, int], ...]
    # How each layer rotates its keys; None where it does not. Equal ones are the same object.
    rotations: tuple[Rotation | None, ...]
    # The position from which on its rotary frequencies change with the length of the prompt; None where they do not.
    rope_reach: int | None = None
    # Where the KV is to go; not a part of what is written.
    device: torch.device = _CPU
    # There are no cards of models whose KV cannot be moved to another position.
    is_movable: ClassVar[bool] = True

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that have KV."""
        return len(self.shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token over all layers."""
        return sum(count * (keys + values) for count, keys, values in self.shapes) * self.dtype.itemsize

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each layer."""
        return (self.device,) * len(self.shapes)

    @classmethod
    def of(cls, decoder: Decoder, identity: str, window: int | None) -> ModelCard:
        """Return the card of a model, whose KV must be movable; it is run on one token."""
        with torch.no_grad():
            layers = decoder.kv_at(torch.zeros((1, 1), dtype=torch.int64, device=decoder.device), 0)
        shapes = tuple((kv.keys.shape[1], kv.keys.shape[-1], kv.values.shape[-1]) for kv in layers)
        return cls(identity, window, layers[0].keys.dtype, shapes, decoder.rotations, decoder.rope_reach)
