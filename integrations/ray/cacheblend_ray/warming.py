"""Warming a corpus: the KV of many documents, computed by workers all over a cluster."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import (
    BackendError,
    CacheBlendError,
    ConfigError,
    PromptError,
    StoreError,
    UnsupportedModelError,
)
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.store import open_remote
from cacheblend_ray.rows import Columns, chunks_of, joined, rows_of

if TYPE_CHECKING:
    from ray.data import Dataset

__all__ = ["WarmJob", "WarmSummary", "Warmer", "connect", "warm"]


@contextmanager
def connect(address: str | None = None) -> Iterator[None]:
    """Use a cluster for the time of a ``with`` block, quietly: the one at an address, one of this machine, or a new one.

    One that this process uses already is left as it is.

    Raises
    ------
    ConfigError
        If Ray is not installed, or there is no cluster at the address.
    """
    with needs_extra("ray", "warming with many machines"):
        import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no cluster of Ray can be used ({str(error).splitlines()[0]}); start one with ray start --head, or give another "
            "address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class WarmSummary:
    """Result of a `warm`.

    Attributes
    ----------
    documents, chunks : int
        Documents that are stored now, and their chunks.
    encoded, unchanged : int
        Chunks whose KV was computed, and was there already.
    tokens : int
        Tokens encoded.
    failed : list of (str, str)
        Documents that are not stored as they should be, and why.
    seconds : float
        How long it took.
    """

    documents: int = 0
    chunks: int = 0
    encoded: int = 0
    unchanged: int = 0
    tokens: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def warm(
    source: Dataset | Any,
    *,
    model: str,
    store: str | Path | None = None,
    config: EngineConfig | None = None,
    document: str = "document",
    text: str = "text",
    chunks: str = "chunks",
    order: str | None = None,
    chunk_tokens: int = 256,
    actors: int | tuple[int, int] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    batch_documents: int = 8,
    retries: int = 5,
    progress: Callable[[int, int | None], None] | None = None,
) -> WarmSummary:
    """Encode whole documents with a pool of Ray's actors, each with an engine of its own, into one store.

    What is there already is not computed again, so that a run that was ended, in whatever way, is finished by calling this once
    more. A document that cannot be encoded does not stop the others. What an actor leaves undone when it dies is done by the one
    that takes its place. Documents that are stored and not in `source` stay as they are.

    Parameters
    ----------
    source : Dataset, path, or list
        Where the documents are: a dataset of Ray Data with a row for each; a file, or a folder with .txt, .md and .rst files; or
        a list of such paths, of rows, or of LlamaIndex's or LangChain's documents.
    model : str
        A Hugging Face id, or a folder that all machines have.
    store : str or Path, optional
        A folder of this name on each machine that keeps what was computed there. With `remote` in `config` none is needed;
        without, it is the store, of one machine.
    config : EngineConfig, optional
        The settings, by default the environment's. Those of who is to answer must be the same: `remote` and `names` above all.
    document, text, chunks : str
        The columns of a dataset: a document's name, which it is asked for by; its text, which is cut; or its chunks instead.
    order : str, optional
        The column by which the rows of a document are sorted, in a dataset where it has several, each with a chunk as `text`.
    chunk_tokens : int
        Most tokens of a chunk, where texts are cut.
    actors : int or (int, int), optional
        How many workers, or how few and how many; by default as many as the cluster has room for.
    num_cpus, num_gpus : float
        What each takes; a quarter of a GPU is 0.25.
    batch_documents : int
        Documents that are encoded together.
    retries : int
        How often what died with its worker is tried again.
    progress : callable, optional
        Called with the numbers of finished and of all documents, the latter None where Ray does not know; Ray's own bars are then
        not shown.

    Returns
    -------
    WarmSummary
        The figures, and what failed.

    Raises
    ------
    ConfigError
        If Ray is not installed, settings contradict each other, or nothing that is computed would be kept.
    BackendError
        If the workers cannot start, or Ray gives up; what was stored stays.
    """
    with needs_extra("ray", "warming with many machines"):
        import ray
        import ray.data
        from ray.exceptions import RayError

    config = EngineConfig.of(config)
    started = time.perf_counter()
    if batch_documents < 1 or chunk_tokens < 1 or retries < 0:
        raise ConfigError("batch_documents and chunk_tokens must be 1 or more, and retries 0 or more")
    if not ray.is_initialized():
        ray.init()
    _check_kept(config, store, sum(node["Alive"] for node in ray.nodes()))
    least, most = _pool_size(actors, num_cpus, num_gpus, ray.cluster_resources())
    columns = Columns(document, text, chunks)
    names: list[str] | None = None
    if isinstance(source, ray.data.Dataset):
        rows = source
        if order is not None:
            join = partial(joined, columns=columns, order=order)
            rows = rows.groupby(document).map_groups(join, batch_format="numpy")
    else:
        found = rows_of(source)
        if not found:
            return WarmSummary(seconds=time.perf_counter() - started)
        columns, names = Columns(), [row["document"] for row in found]
        # A block is what is lost with a worker, and what another takes.
        blocks = math.ceil(len(found) / batch_documents)
        rows = ray.data.from_items(found, override_num_blocks=blocks)
        least, most = min(least, blocks), min(most, blocks)
    context = rows.context
    if names is not None:
        # They are known by their names: what is lost is told.
        context.max_errored_blocks = -1
    if progress is not None:
        context.enable_progress_bars = False
    job = WarmJob(model, None if store is None else str(store), config, columns, chunk_tokens)
    with warnings.catch_warnings():
        # Options of actors are to go in Ray 2.64, and there is no other way yet to say how often a task is tried again.
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        results = rows.map_batches(
            Warmer,
            fn_constructor_args=(job,),
            batch_size=batch_documents,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
            max_task_retries=retries,
        )
    summary = WarmSummary()
    seen: set[str] = set()
    try:
        for batch in results.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
            _count(summary, seen, batch)
            if progress is not None:
                progress(len(seen), None if names is None else len(names))
    except RayError as error:
        said = str(error.__cause__ or error).strip().splitlines()
        raise BackendError(
            f"warming ended early: {said[-1] if said else type(error).__name__}; what was stored stays; run the same "
            "call again to continue"
        ) from error
    reason = "its worker ended each time it was tried; the log of Ray says why"
    summary.failed += [(name, reason) for name in names or () if name not in seen]
    summary.seconds = time.perf_counter() - started
    return summary


def _count(summary: WarmSummary, seen: set[str], batch: Any) -> None:
    rows = zip(*(batch[name] for name in ("document", "chunks", "encoded", "tokens", "error")), strict=True)
    for name, chunks, encoded, tokens, error in rows:
        seen.add(str(name))
        summary.encoded += int(encoded)
        summary.tokens += int(tokens)
        if error:
            summary.failed.append((str(name), str(error)))
            continue
        summary.documents += 1
        summary.chunks += int(chunks)
    summary.unchanged = max(summary.chunks - summary.encoded, 0)


def _check_kept(config: EngineConfig, store: str | Path | None, machines: int) -> None:
    """See that what is computed is kept where all machines find it."""
    if config.remote is not None:
        return
    if store is None:
        raise ConfigError(
            "no warmed KV would be kept: give remote, the address of a tier that all machines share "
            "(EngineConfig(remote=...), CACHEBLEND_REMOTE), or on one machine a store"
        )
    if machines > 1:
        raise ConfigError(
            f"the cluster has {machines} machines, and the folder {store} would differ on each; give remote, the address "
            "of a tier that all of them share (EngineConfig(remote=...), CACHEBLEND_REMOTE)"
        )


def _pool_size(
    actors: int | tuple[int, int] | None, num_cpus: float, num_gpus: float, resources: dict[str, float]
) -> tuple[int, int]:
    least, most = (actors, actors) if isinstance(actors, int) else actors or (1, 0)
    if actors is None:
        shares = [resources.get("CPU", 0) / num_cpus] if num_cpus else []
        shares += [resources.get("GPU", 0) / num_gpus] if num_gpus else []
        most = max(1, int(min(shares, default=1)))
    if not 1 <= least <= most:
        raise ConfigError(f"actors={actors!r} must be a number of workers, or a minimum and maximum, 1 or more")
    return least, most


_LOST = (
    "the KV of {} of its chunks did not reach the remote tier, or is gone from it again; see that it has room for the whole "
    "corpus (warm --estimate says how much that is), and warm it again"
)


@dataclass(frozen=True)
class WarmJob:
    """Job that all workers are given.

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
            raise StoreError(f"the store in {job.store} cannot be written, so warmed KV would be lost")

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
        # Uploads go on in the background, where only a limited amount may wait.
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
        records = [record for record in self._engine.records(ids) if record is not None]
        keys = [key for record in records for key in record.keys]
        held = dict(zip(keys, self._remote.holds(keys), strict=True))
        return set(ids) - {record.id for record in records if all(held[key] for key in record.keys)}

    def _count(self, text: str) -> int:
        try:
            return lexer_of(self._engine.tokenizer).count(text)
        except Exception as error:
            raise PromptError(f"the text {text[:40]!r} cannot be tokenised: {error}") from error


@dataclass
class _Done:
    """Outcome of a document; in a batch, the first has the figures of all."""

    document: str
    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    error: str = ""
