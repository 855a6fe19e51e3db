"""Warming a corpus: the KV of many documents, computed by workers all over a cluster."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.documents.splitter import named_chunks, split_text
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import BackendError, ConfigError, PromptError, UnsupportedModelError, needs_extra
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.store import open_remote

if TYPE_CHECKING:
    from ray.data import Dataset

__all__ = ["WarmSummary", "Warmer", "warm"]

# How often what died with its worker is tried again.
_RETRIES = 5
_DIED = "its worker ended each time it was tried; the log of Ray says why"
_LOST = (
    "the KV of a chunk of it did not reach the remote tier, or is gone from it again; see that it has room for the whole corpus "
    "(warm --estimate says how much that is), and warm it again"
)


@dataclass
class WarmSummary:
    """Result of a `warm`.

    Attributes
    ----------
    documents, chunks : int
        Documents that are stored now, and their chunks.
    encoded : int
        Chunks whose KV was computed; that of the others was there already.
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
    tokens: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def warm(
    source: Dataset | Iterable[Mapping[str, Any]],
    *,
    model: str,
    store: str | Path | None = None,
    config: EngineConfig | None = None,
    chunk_tokens: int = 256,
    actors: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    batch_documents: int = 8,
) -> WarmSummary:
    """Encode whole documents with a pool of Ray's actors, each with an engine of its own, into one store.

    What is there already is not computed again, so that a run that was ended, in whatever way, is finished by calling this once
    more. A document that cannot be encoded does not stop the others. What an actor leaves undone when it dies is done by the one
    that takes its place. Documents that are stored and not in `source` stay as they are.

    Parameters
    ----------
    source : Dataset, or list of dict
        A row for each document: `document`, its name, and `text`, which is cut, or `chunks`, a list of strings.
    model : str
        A Hugging Face id, or a folder that all machines have.
    store : str or Path, optional
        A folder of this name on each machine that keeps what was computed there. With `remote` in `config` none is needed;
        without, it is the store, of one machine.
    config : EngineConfig, optional
        The settings, by default the environment's. Those of who is to answer must be the same: `remote` and `names` above all.
    chunk_tokens : int
        Most tokens of a chunk, where texts are cut.
    actors : int, optional
        How many workers; by default as many as the cluster has room for.
    num_cpus, num_gpus : float
        What each takes; a quarter of a GPU is 0.25.
    batch_documents : int
        Documents that are encoded together.

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

    config, started = EngineConfig.of(config), time.perf_counter()
    if min(batch_documents, chunk_tokens, 1 if actors is None else actors) < 1:
        raise ConfigError("batch_documents, chunk_tokens and actors must be 1 or more")
    if not ray.is_initialized():
        ray.init()
    if config.remote is None and (store is None or sum(node["Alive"] for node in ray.nodes()) > 1):
        raise ConfigError(
            "no warmed KV would be kept where others find it: give remote, the address of a tier that all machines share "
            "(EngineConfig(remote=...), CACHEBLEND_REMOTE), or on a cluster of one machine a store"
        )
    left: set[str] = set()
    if isinstance(source, ray.data.Dataset):
        rows = source
    else:
        found = _checked(source)
        if not found:
            return WarmSummary()
        left.update(row["document"] for row in found)
        # A block is what is lost with a worker, and what another takes.
        rows = ray.data.from_items(found, override_num_blocks=math.ceil(len(found) / batch_documents))
        # They are known by their names: what is lost is told.
        rows.context.max_errored_blocks = -1
    with warnings.catch_warnings():
        # Options of actors are to go in Ray 2.64, and there is no other way yet to say how often a task is tried again.
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        results = rows.map_batches(
            Warmer,
            fn_constructor_args=(model, store, config, chunk_tokens),
            batch_size=batch_documents,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
            max_task_retries=_RETRIES,
        )
    summary = WarmSummary()
    try:
        for row in results.iter_rows():
            left.discard(row["document"])
            summary.encoded += row["encoded"]
            summary.tokens += row["tokens"]
            if row["error"]:
                summary.failed.append((row["document"], row["error"]))
            else:
                summary.documents += 1
                summary.chunks += row["chunks"]
    except RayError as error:
        said = str(error.__cause__ or error).strip().splitlines()
        raise BackendError(
            f"warming ended early: {said[-1] if said else type(error).__name__}; what was stored stays; run the same "
            "call again to continue"
        ) from error
    summary.failed += [(name, _DIED) for name in sorted(left)]
    summary.seconds = time.perf_counter() - started
    return summary


def _checked(source: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the same columns, of which none is empty, since Ray would make one of numbers of it."""
    rows = [{name: row.get(name) for name in ("document", "text", "chunks")} for row in source]
    names = [row["document"] for row in rows]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ConfigError("give each row a 'document', the name of its document, that no other row has")
    kept = [name for name in ("document", "text", "chunks") if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in kept} for row in rows]


class Warmer:
    """Encodes documents, for `Dataset.map_batches`; a batch is answered when all of its KV is where others find it."""

    def __init__(self, model: str, store: str | Path | None, config: EngineConfig, chunk_tokens: int = 256) -> None:
        self._engine = BlendEngine.from_pretrained(model, store=store and Path(store), config=config)
        if self._engine.unsupported_reason is not None:
            raise UnsupportedModelError(f"no KV is computed for {model}: {self._engine.unsupported_reason}")
        self._remote = None if config.remote is None else open_remote(config.remote.get_secret_value())
        self._count = lexer_of(self._engine.tokenizer).count
        self._chunk_tokens = chunk_tokens

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Encode the documents of a batch, a row each; returns what became of each."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        try:
            done = self._add(rows)
        except Exception:
            # One of them is at fault, and which one is seen when each comes alone.
            done = []
            for row in rows:
                try:
                    done += self._add([row])
                except Exception as error:
                    # Of any type: the other documents are to be done all the same, and it is told.
                    done.append((str(row.get("document")), 0, 0, 0, f"{type(error).__name__}: {error}"))
        return dict(
            zip(("document", "chunks", "encoded", "tokens", "error"), map(list, zip(*done, strict=True)), strict=True)
        )

    def _add(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int, int, str]]:
        """Encode whole documents, and return what became of each; the first has the figures of all."""
        documents = [self._chunks_of(row) for row in rows]
        chunks = [chunk for each in documents for chunk in each]
        # Uploads go on in the background, and what is evicted here before its turn is not uploaded.
        result = self._engine.add(chunks, whole=True, progress=lambda done, total: self._engine.flush())
        self._engine.flush()
        done = []
        for number, (row, each) in enumerate(zip(rows, documents, strict=True)):
            figures = (0, 0) if number else (result.encoded, result.tokens)
            done.append((row["document"], len(each), *figures, "" if self._is_there(each) else _LOST))
        return done

    def _chunks_of(self, row: Mapping[str, Any]) -> list[Chunk]:
        """Return the chunks of the document in a row, with the ids that the server gives them."""
        name, text, given = row.get("document"), row.get("text"), row.get("chunks")
        if not isinstance(name, str) or not name:
            raise PromptError(f"the row has no document, but {name!r:.40}; give a name to each")
        # Not a number is what pandas has for nothing.
        if given is not None and not isinstance(given, float):
            pieces = [str(piece) for piece in given]
        elif isinstance(text, str):
            pieces = split_text(text, self._count, self._chunk_tokens)
        else:
            raise PromptError(
                f"the document {name!r:.80} has neither 'text' nor 'chunks'; rename the columns that have them"
            )
        if not pieces or not all(piece.strip() for piece in pieces):
            raise PromptError(f"the document {name!r:.80} is blank, or a chunk of it is; leave that out")
        return list(named_chunks(name, pieces))

    def _is_there(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether other machines find the KV of chunks, as far as there is a remote tier."""
        ids = [chunk.id for chunk in chunks if chunk.id is not None]
        records = self._engine.records(ids)
        keys = [key for record in records if record is not None for key in record.keys]
        return self._remote is None or (None not in records and all(self._remote.holds(keys)))
