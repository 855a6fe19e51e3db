"""What a conversation has computed, kept from one turn to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.taken import LEAST_RUN, HeldTurn, Resumption, find_runs, gaps, readers_of, seen_by
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan
from cacheblend_rag.store import KVStore

__all__ = ["Conversation", "Conversations"]


class Conversation:
    """The KV of a conversation's last turn, prompt and answer, for the next turn to go on from.

    Made by `BlendEngine.conversation`, and given to each of its turns. What a turn takes over is found by token ids alone:

    - The tokens that both turns begin with keep their KV as it is. Nothing of them is computed, loaded or chosen again.
    - Other tokens in a row that the turn before had elsewhere, as the history of a chat behind another context, keep their KV as
      chunks do: moved to their new positions and blended, by the selector and at the ratio of the turn.
    - All others are computed; chunks come from the store, as ever.

    The KV of a row is exact if the row was computed, and all rows before it are exact. Where a turn is computed as a whole, as at
    ``recompute_ratio=1``, only the exact rows that both turns begin with are taken over, so that the turn has the answer of the
    model's own ``generate`` (as far as rounding lets a token that is computed alone equal one that is computed among others).
    At lower ratios, first rows that are not exact are taken over unless they were made at a lower ratio than this turn's.

    A row that was computed behind a chunk knows of it. When a chunk is deleted or replaced, by whatever process, every row that
    may know of it is dropped: at once by the engine that deletes it, else before the next turn; and so where a prompt brings a
    chunk whose text is another than it was. A chunk that came without an id cannot be deleted, and one whose id the engine does
    not know, or knows for another text, vouches for nothing: what stands behind it is computed anew in the next turn.

    Nothing is taken over by or kept of prompts with positions of their own, and where the model cannot be blended. With
    ``kv_capacity``, which drops rows, nothing is kept.

    Parameters
    ----------
    store : KVStore
        Knows which chunks there are.
    namespace : str
        Where their names are.
    max_bytes : int
        Most bytes of KV; of a longer turn its first rows are kept.
    """

    def __init__(self, store: KVStore, namespace: str, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._held: HeldTurn | None = None
        self._resets = 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds KV of."""
        held = self._held
        return 0 if held is None else len(held.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of KV it holds, where the model computes."""
        held = self._held
        return 0 if held is None else held.nbytes

    def reset(self) -> None:
        """Forget everything; what turns compute that have been asked for by now is not kept, whether they run or wait."""
        with self._lock:
            self._held = None
            self._resets += 1

    def belongs_to(self, store: KVStore, namespace: str) -> bool:
        """Return whether it is a conversation with this store and model."""
        return self._store is store and self._namespace == namespace

    def refresh(self) -> None:
        """Drop every row that may know of a chunk which was deleted or replaced."""
        with self._lock:
            self._drop_stale()

    @property
    def resets(self) -> int:
        """How often it was reset."""
        return self._resets

    def resume(self, prompt: AssembledPrompt, ratio: float, *, blended: bool, moves: bool) -> Resumption | None:
        """Return what a prompt takes over, or None if that is nothing.

        Parameters
        ----------
        prompt : AssembledPrompt
            The prompt.
        ratio : float
            Its recompute ratio.
        blended : bool
            Whether it is blended; otherwise it is computed as a whole.
        """
        with self._lock:
            self._drop_stale({part.id: part.key for part in (*prompt.chunks, *prompt.computed) if part.id is not None})
            held = self._held
        if held is None or prompt.has_positions:
            return None
        layout = prompt.layout
        # The last row is computed: its logits are what the prompt is for.
        end = len(layout) - 1
        pairs = zip(held.token_ids, layout.token_ids[:end], strict=False)
        rows = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not blended or ratio > held.ratio:
            rows = min(rows, held.exact)
        if blended:
            # A chunk that is held in part comes from the store whole.
            rows = min([rows, *(span.start for span in layout.chunks if span.start < rows < span.stop)])
        if rows < LEAST_RUN:
            rows = 0
        behind = tuple(span for span in layout.chunks if span.start >= rows)
        runs = tuple(find_runs(held.token_ids, layout.token_ids, gaps(rows, behind, end), rows)) if moves else ()
        if not rows and not runs:
            return None
        first = [LayerKV(*(tensor[:, :, :rows] for tensor in layer)) for layer in held.layers]
        spans = [*behind, *(ChunkSpan(run.start, run.stop, run.start) for run in runs)] if blended else []
        exact = layout.exact_chunks if len(behind) == len(layout.chunks) else 0
        spans.sort(key=lambda span: span.start)
        if exact and spans and spans[0] != layout.chunks[0]:
            exact = 0
        return Resumption(
            replace(layout, chunks=tuple(spans), exact_chunks=exact if spans else 0, resumed_rows=rows),
            first,
            len(layout.chunks) - len(behind),
            readers_of(held, runs),
            runs,
            held,
        )

    def keep(
        self,
        prompt: AssembledPrompt,
        output_ids: Sequence[int],
        layers: list[LayerKV],
        resumption: Resumption | None,
        ratio: float,
        *,
        blended: bool,
        resets: int,
    ) -> None:
        """Hold a turn that is over, instead of the one before.

        Parameters
        ----------
        prompt : AssembledPrompt
            The prompt.
        output_ids : sequence of int
            What was generated.
        layers : list of LayerKV
            The KV of all that the model has read, ``(1, num_kv_heads, seq_len, head_dim)`` for each layer. Taken over.
        resumption : Resumption or None
            What the prompt took over.
        ratio : float
            The recompute ratio it was prefilled at.
        blended : bool
            Whether it was blended.
        resets : int
            `resets` when the turn was asked for; nothing is kept where it has changed.
        """
        if prompt.has_positions:
            return
        ids = (prompt.layout.token_ids + tuple(output_ids))[: layers[0].keys.shape[2]]
        resumed = 0 if resumption is None else resumption.layout.resumed_rows
        before = None if resumption is None else resumption.held
        exact, lowest = len(ids), 1.0
        if before is not None and resumed > before.exact:
            exact, lowest = before.exact, before.ratio
        if blended:
            spans = prompt.layout.chunks if resumption is None else resumption.layout.chunks
            exact = min([exact, *(span.start for span in spans)])
            lowest = min(lowest, ratio)
        turn = HeldTurn(ids, layers, exact, lowest, seen_by(prompt, resumption))
        room = min(self.max_bytes // turn.row_bytes, len(ids) - 1)
        held = turn if turn.nbytes <= self.max_bytes else turn.cut(room)
        with self._lock:
            if self._resets == resets:
                self._held = held
                # A chunk that was deleted while the turn was computed.
                self._drop_stale()

    def _drop_stale(self, given: Mapping[str, str] | None = None) -> None:
        """Drop what may know of texts that are gone; `given` are the keys of a prompt's chunks by their ids, and may be news."""
        held = self._held
        if held is None or not held.seen:
            return
        known = self._store.lookup(self._namespace, list(dict.fromkeys(name for name, _ in held.seen)))
        keys = {record.id: record.key for record in known if record is not None}
        given = given or {}
        stale = [row for (name, key), row in held.seen.items() if not key == keys.get(name) == given.get(name, key)]
        if stale:
            self._held = held.cut(min(stale))


class Conversations:
    """The conversations of one engine, as long as somebody has them.

    Parameters
    ----------
    store : KVStore
        The engine's store.
    namespace : str
        Where its names are.
    """

    def __init__(self, store: KVStore, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[Conversation] = weakref.WeakSet()

    def begin(self, max_bytes: int) -> Conversation:
        """Return a new one, that holds at most so many bytes."""
        conversation = Conversation(self._store, self._namespace, max_bytes)
        with self._lock:
            self._all.add(conversation)
        return conversation

    def checked(self, conversation: Conversation | None) -> Conversation | None:
        """Return `conversation`.

        Raises
        ------
        ConfigError
            If it is one with another engine.
        """
        if conversation is not None and not conversation.belongs_to(self._store, self._namespace):
            raise ConfigError(
                "the conversation is one with another engine, whose KV is of no use here; make it by this engine's conversation()"
            )
        return conversation

    def refresh(self) -> None:
        """Have every one drop what may know of chunks that are no longer there."""
        for conversation in self._listed():
            conversation.refresh()

    def close(self) -> None:
        """Forget everything."""
        for conversation in self._listed():
            conversation.reset()

    def _listed(self) -> list[Conversation]:
        with self._lock:
            return list(self._all)
