"""Encoding by vLLM: what is not stored is computed by the server that serves, so that the device holds the weights once."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from cacheblend_rag.encode import ChunkEncoder, Target
from cacheblend_rag.errors import PromptError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import ModelCard
from vllm_cacheblend.spooling import read_spool, remove_spool

__all__ = ["VLLMEncoder", "Warm"]


class Warm(Protocol):
    """Has vLLM compute prompts, each of which it writes to the spool."""

    def __call__(self, prompts: Sequence[tuple[str, tuple[int, ...]]], salt: str, is_awaited: bool) -> None:
        """Return when all are written.

        Parameters
        ----------
        prompts : sequence of (str, tuple of int)
            The name under which each is written, and its token ids.
        salt : str
            The `cache_salt` of all of them: vLLM shares what it computes among prompts of equal salts only.
        is_awaited : bool
            Whether an answer waits for them; others come after all that are answered.
        """


class VLLMEncoder(ChunkEncoder):
    """Computes the KV of chunks by requests to vLLM, one for each text that is read in one go.

    What two readings of one encoder begin with alike vLLM's own prefix cache has.

    Parameters
    ----------
    card : ModelCard
        The model's KV.
    preamble : sequence of int
        The preamble.
    batch_tokens : int
        Most tokens that are asked for at once.
    spool : Path
        The folder that vLLM was told to write to (`kv_transfer_config`).
    warm : Warm
        Asks vLLM.
    """

    def __init__(self, card: ModelCard, preamble: Sequence[int], batch_tokens: int, spool: Path, warm: Warm) -> None:
        super().__init__(card, preamble, batch_tokens)
        self._heads = [heads for heads, _, _ in card.shapes]
        self._spool = spool
        self._warm = warm
        # A secret: how long a text takes must not tell one tenant what another has added.
        self._salt = secrets.token_hex(16)

    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        if any(target.positions is not None for target in targets):
            raise PromptError(
                "the chunks have positions, as in a schema, but vLLM places tokens one after the other; add "
                "them through an engine in this process"
            )
        for batch in self.batches(targets):
            steps = [step for reading in batch for step in reading]
            read = self._read([self.preamble + sequence for sequence, _ in steps])
            yield [
                (index, self.cut_out(layers, targets[index]))
                for (_, indices), layers in zip(steps, read, strict=True)
                for index in indices
            ]

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        [layers] = self._read([tuple(token_ids)], is_awaited=True)
        return ChunkKV(tuple(token_ids), 0, layers)

    def _read(self, prompts: Sequence[tuple[int, ...]], is_awaited: bool = False) -> Iterator[list[LayerKV]]:
        names = [uuid.uuid4().hex for _ in prompts]
        try:
            self._warm(list(zip(names, prompts, strict=True)), self._salt, is_awaited)
            for name in names:
                yield read_spool(self._spool, name, self._heads)
        finally:
            # What was written before one of them failed.
            for name in names:
                remove_spool(self._spool, name)
