"""Share of an answer's attention that went to each chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cacheblend_attachments.watching import Watching, look_layers
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.backend import RunningForward
from cacheblend_rag.layout import ChunkSpan
from cacheblend_rag.model import AttentionCall, attention_weights, watch_attention

__all__ = ["SourceAttention"]


class SourceAttention(Watching):
    """Has reports say how much of the answer's attention went to each chunk (`ChunkReport.attention`), in the middle layers.

    The rows after which the tokens of the answer are written are watched: the prompt's last row, and then each new token's. Their
    attention is computed a second time for that.
    """

    def attached(self, engine: BlendEngine) -> None:
        super().attached(engine)
        assert engine.decoder is not None
        self._layers = look_layers(None, engine.decoder.num_layers)

    @contextmanager
    def around(self, forward: RunningForward) -> Iterator[None]:
        length, layers = len(forward.request.prompt.layout), forward.cache.kv_layers
        mass: dict[int, torch.Tensor] = {}
        steps, seen = Counter[int](), Counter[int]()

        def note(call: AttentionCall) -> None:
            layer = next((each for each in self._layers if layers[each].keys is call.key), None)
            columns = call.key.shape[2]
            # Rows that make up for a layer later on come without the last token.
            if layer is None or columns <= seen[layer]:
                return
            seen[layer] = columns
            weights = attention_weights(call, 1)[:, 0, :length].mean(dim=0)
            mass[layer] = weights + mass[layer] if layer in mass else weights
            steps[layer] += 1

        def share(span: ChunkSpan) -> float:
            shares = [float(mass[layer][span.start : span.stop].sum()) / steps[layer] for layer in mass]
            return sum(shares) / len(shares) if shares else 0.0

        forward.request.state.attention = share
        with watch_attention(note):
            yield

    def for_tenant(self) -> SourceAttention:
        return SourceAttention()
