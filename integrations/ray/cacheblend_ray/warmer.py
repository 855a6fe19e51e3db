"""A worker of `warm`: one engine, which encodes the documents that Ray brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, PromptError, StoreError, UnsupportedModelError
from cacheblend_rag.store.remote import open_remote
from cacheblend_ray.rows import Columns, chunks_of

__all__ = ["WarmJob", "Warmer"]

_LOST = (
    "the KV of {} of its chunks did not reach the remote tier, or is gone from it again; see that it has room for the whole "
    "corpus (warm --estimate says how much that is), and warm it again"
)


@dataclass(frozen=True)
class WarmJob:
    """What all workers are told.

    Attributes
    ----------
    model : str
        The model's name.
    store : str or None
        A folder of each machine for what is computed there; None for none.
    config : EngineConfig
        The engine's settings.
    columns : Columns
        Where a row has its document.
    chunk_tokens : int
        Most tokens of a chunk of a text.
    """

    model: str
    store: str | None
    config: EngineConfig
    columns: Columns
    chunk_tokens: int


class Warmer:
    """Encodes documents, batch by batch; a batch is answered when all of its KV is where others find it.

    Parameters
    ----------
    job : WarmJob
        What to do.

    Raises
    ------
    UnsupportedModelError
        If the model's KV cannot be blended.
    StoreError
        If nothing that is computed would outlive this process.
    """

    def __init__(self, job: WarmJob) -> None:
        self._job = job
        self._engine = BlendEngine.from_pretrained(job.model, store=job.store and Path(job.store), config=job.config)
        if self._engine.unsupported_reason is not None:
            raise UnsupportedModelError(f"no KV is computed for {job.model}: {self._engine.unsupported_reason}")
        self._remote = None if job.config.remote is None else open_remote(job.config.remote.get_secret_value())
        if self._remote is None and not self._engine.store.outlives_process:
            raise StoreError(f"the store in {job.store} cannot be written, and what is warmed would be lost")

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Encode the documents of a batch, a row each; returns what became of each."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        done: list[_Done] = []
        ready: list[tuple[str, list[Chunk]]] = []
        for row in rows:
            name = str(row.get(self._job.columns.document))
            try:
                ready.append((name, chunks_of(row, self._job.columns, self._count, self._job.chunk_tokens)))
            except CacheBlendError as error:
                done.append(_Done(name, error=str(error)))
        try:
            done += self._add(ready)
        except Exception:
            # One of them is at fault, and which one is seen when each comes alone.
            for one in ready:
                try:
                    done += self._add([one])
                except Exception as error:
                    # Of any type: the other documents are to be done all the same, and it is told.
                    done.append(_Done(one[0], len(one[1]), error=f"{type(error).__name__}: {error}"))
        return {name: [getattr(each, name) for each in done] for name in _Done.__annotations__}

    def _add(self, documents: Sequence[tuple[str, list[Chunk]]]) -> list[_Done]:
        """Encode whole documents; the first of what is returned has the figures of all."""
        chunks = [chunk for _, each in documents for chunk in each]
        if not chunks:
            return []
        # Uploads go on in the background, where no more than so much may wait.
        result = self._engine.add(chunks, whole=True, progress=lambda done, total: self._engine.flush())
        self._engine.flush()
        lost = self._not_stored(chunks)
        done = []
        for name, each in documents:
            gone = sum(chunk.id in lost for chunk in each)
            done.append(_Done(name, len(each), error=_LOST.format(gone) if gone else ""))
        done[0].encoded, done[0].tokens = result.encoded, result.tokens
        return done

    def _not_stored(self, chunks: Sequence[Chunk]) -> set[str]:
        """Return the ids of chunks whose KV other machines do not find."""
        if self._remote is None:
            return set()
        ids = [chunk.id for chunk in chunks if chunk.id is not None]
        records = self._engine.records(ids)
        known = {record.id: record.key for record in records if record is not None}
        held = dict(zip(known, self._remote.holds(list(known.values())), strict=True))
        return {id for id in ids if not held.get(id, False)}

    def _count(self, text: str) -> int:
        try:
            # Long texts are meant to be counted here, so no warning that one exceeds the model's window.
            return len(self._engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except Exception as error:
            raise PromptError(f"the text {text[:40]!r} cannot be tokenised: {error}") from error


@dataclass
class _Done:
    """What became of a document; in a batch, the first has the figures of all."""

    document: str
    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    error: str = ""
