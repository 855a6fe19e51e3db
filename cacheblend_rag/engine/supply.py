"""The KV of a prompt's chunks: what is stored is opened, what is missing is encoded and stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.encode import Encoder
from cacheblend_rag.engine.prompt import PromptChunk
from cacheblend_rag.engine.run import PromptRun
from cacheblend_rag.engine.turn import turn_of
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.model import Decoder, num_decoder_layers
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.part import part_of
from cacheblend_rag.store.ram import RamReader

__all__ = ["KVSupply"]

logger = logging.getLogger(__name__)


class KVSupply:
    """Supplies the KV of chunks, from one store or by one model.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended: there is no KV then.
    store : KVStore
        Where KV is kept.
    namespace : str
        Where its names are.
    prefix_ids : sequence of int
        The encoding prefix.
    config : BlendConfig
        The engine's settings.

    Attributes
    ----------
    lock : Turn
        Whose turn it is on the model.
    num_kv_layers : int
        Layers of the model that have KV of their own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        store: KVStore,
        namespace: str,
        prefix_ids: Sequence[int],
        config: BlendConfig,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._encoder = None if decoder is None else Encoder(decoder, prefix_ids, config.encode_batch_tokens)
        self._config = config
        self._tenant = config.namespace or ""
        self.num_kv_layers = num_decoder_layers(model) if decoder is None else decoder.num_kv_layers
        self._warned_of_no_hit = False
        self.lock = turn_of(model)

    def plan(self, lengths: Sequence[int], placed: Sequence[bool] = ()) -> list[list[int]]:
        """Return the batches in which chunks of these lengths are encoded; see `Encoder.plan`."""
        assert self._encoder is not None
        return self._encoder.plan(lengths, placed)

    def encode(
        self,
        token_ids: Sequence[Sequence[int]],
        places: Sequence[Sequence[int] | None] = (),
        *,
        patient: bool = False,
        until: float | None = None,
    ) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks, giving way to prompts between batches; yields as `Encoder.encode` does.

        Parameters
        ----------
        token_ids : sequence of sequence of int
            Token ids of each chunk.
        places : sequence of (sequence of int or None), optional
            Where its tokens stand; see `Encoder.encode`.
        patient : bool
            Whether all prompts that wait go first, rather than those that came first.
        until : float, optional
            When to give up waiting for the model, by `time.perf_counter`.
        """
        assert self._encoder is not None
        batches = self._encoder.encode(token_ids, places)
        while True:
            with self.lock.after_others() if patient else self.lock.within(until):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def measure(self, kv: ChunkKV, neighbours: Sequence[int], *, patient: bool = False) -> ChunkKV:
        """Return a chunk's KV with how much each token's changes behind other chunks; see `Encoder.sensitivity`.

        Parameters
        ----------
        kv : ChunkKV
            The KV of the chunk alone.
        neighbours : sequence of int
            Token ids of what it is likely to stand behind.
        patient : bool
            Whether all prompts that wait go first, rather than those that came first.
        """
        assert self._encoder is not None
        with self.lock.after_others() if patient else self.lock:
            return kv.measured(self._encoder.sensitivity(kv, neighbours))

    def encode_misses(self, runs: Sequence[PromptRun]) -> None:
        """Encode in one go the chunks of several prompts that have no stored KV, each once, and hand it to those prompts.

        Parameters
        ----------
        runs : sequence of PromptRun
            The prompts, before their prefill, all of which will be blended.
        """
        missing: dict[str, list[tuple[PromptRun, PromptChunk]]] = {}
        for run in runs:
            chunks = run.prompt.chunks
            run.hits = self._store.holds([chunk.key for chunk in chunks])
            for chunk, hit in zip(chunks, run.hits, strict=True):
                if not hit:
                    missing.setdefault(chunk.key, []).append((run, chunk))
        keys = list(missing)
        started = time.perf_counter()
        texts = [missing[key][0][1] for key in keys]
        places = [chunk.positions for chunk in texts]
        until = min((run.wait_until for run in runs if run.wait_until is not None), default=None)
        for batch in self.encode([chunk.token_ids for chunk in texts], places, until=until) if keys else ():
            for index, kv in batch:
                wanted = missing[keys[index]]
                self._keep([chunk for _, chunk in wanted], kv)
                for run, _ in wanted:
                    run.encoded[keys[index]] = kv
        elapsed = time.perf_counter() - started
        tokens = sum(len(chunk.token_ids) for wanted in missing.values() for _, chunk in wanted)
        for run, chunk in (each for wanted in missing.values() for each in wanted):
            run.encode_s += elapsed * len(chunk.token_ids) / tokens

    def open_all(self, run: PromptRun) -> dict[str, KVReader | None]:
        """Open the stored KV of every chunk of a prompt that no conversation has; its hits, tiers and times are filled in.

        Parameters
        ----------
        run : PromptRun
            The prompt.

        Returns
        -------
        dict of str to (KVReader or None)
            A reader of each chunk, by its key; None where there is no stored KV.
        """
        held = 0 if run.resumed is None else run.resumed.chunks
        chunks = run.prompt.chunks[held:]
        opening = time.perf_counter()
        found = {
            chunk.key: RamReader(run.encoded[chunk.key]) if chunk.key in run.encoded else self._open(chunk)
            for chunk in chunks
        }
        run.open_s += time.perf_counter() - opening
        # After damaged KV the prompt is run again; what was a hit when the call came stays one in the report.
        run.hits = run.hits or [True] * held + [found[chunk.key] is not None for chunk in chunks]
        opened = [found[chunk.key] for chunk in chunks]
        read = (
            None if reader is None or chunk.key in run.encoded else reader.tier
            for chunk, reader in zip(chunks, opened, strict=True)
        )
        run.tiers = [*[None] * held, *read]
        return found

    def readers(self, run: PromptRun, found: dict[str, KVReader | None]) -> list[KVReader]:
        """Return a reader for every chunk that no conversation has, encoding in one go those that have no stored KV.

        Parameters
        ----------
        run : PromptRun
            The prompt.
        found : dict of str to (KVReader or None)
            What `open_all` returned for it; completed.

        Returns
        -------
        list of KVReader
            The readers, in the order of the prompt; of a chunk that stands there in part, of that part.
        """
        chunks = run.prompt.chunks[0 if run.resumed is None else run.resumed.chunks :]
        missing = {chunk.key: chunk for chunk in chunks if found[chunk.key] is None}
        if missing:
            started = time.perf_counter()
            keys = list(missing)
            places = [chunk.positions for chunk in missing.values()]
            for batch in self.encode([chunk.token_ids for chunk in missing.values()], places):
                for index, kv in batch:
                    found[keys[index]] = RamReader(kv)
                    self._keep([chunk for chunk in chunks if chunk.key == keys[index]], kv)
            run.encode_s += time.perf_counter() - started
        # Where chunks are encoded when they are used the second time, that is as it should be.
        expected = self._config.encode_on == "second_use"
        if not any(run.hits) and not expected and not self._warned_of_no_hit:
            self._warned_of_no_hit = True
            logger.warning(
                "none of the %d chunks of this prompt was stored, so all of them were encoded first; add chunks before they "
                "are asked for (this is said once)",
                len(chunks),
            )
        return [
            reader if chunk.part is None else part_of(reader, *chunk.part)
            for chunk in chunks
            if (reader := found[chunk.key]) is not None
        ]

    def discard(self, key: str) -> None:
        """Drop stored KV that is damaged or not what it is stored for; it is a miss from now on."""
        _quietly(self._store.discard, key)

    def _keep(self, chunks: Sequence[PromptChunk], kv: ChunkKV) -> None:
        """Store the KV of a miss so that deleting the chunk deletes it: under its name, or else in RAM only.

        A chunk that came with an id nobody knew is named, as if it had been added. A text without an id, or with the id of
        another text, has no name to be deleted by. It is written in the background: the answer does not wait.
        """
        key = chunks[0].key
        new = [chunk.record() for chunk in chunks if chunk.id is not None and chunk.text_hash is not None]
        known = [chunk.id for chunk in chunks if chunk.id is not None and chunk.named]
        owner: dict[str, Any] = {"tenant": self._tenant, "ttl_s": self._config.ttl_s}
        if new or known:
            _quietly(self._store.put_later, key, kv, self._namespace, new, known, **owner)
        else:
            self._store.cache(key, kv, **owner)

    def _open(self, chunk: PromptChunk) -> KVReader | None:
        reader = self._store.open(chunk.key)
        if reader is not None and (reader.token_ids != chunk.token_ids or reader.num_layers != self.num_kv_layers):
            logger.warning(
                "stored KV %s… is not of the chunk it is stored for; it will be computed again", chunk.key[:12]
            )
            self.discard(chunk.key)
            return None
        return reader


def _quietly(write: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Write to the store on the way to an answer, which a store that cannot be written does not prevent."""
    try:
        write(*arguments, **options)
    except StoreError as error:
        logger.warning("the store could not be written: %s", error)
