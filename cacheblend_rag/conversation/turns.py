"""What a conversation has computed, kept from one turn to the next, and what the next turn reuses of it."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from cacheblend_rag.conversation.kept import HeldTurn, KeptTurns, KnownChunks, Making, Seen
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.prompt import AssembledPrompt
from cacheblend_rag.store import KVReader
from cacheblend_rag.store.memory import DeviceReader, ResidentKV, Upload, event_now

__all__ = ["Conversation", "Resumption", "Turn"]

_LEAST_RUN = 8
"""Shorter runs of tokens are simply computed: that costs less than it might lose, and they may match by chance."""


@dataclass(frozen=True, slots=True)
class Run:
    """Half-open rows of a prompt whose tokens are those of a conversation from row `source` on."""

    start: int
    stop: int
    source: int

    @property
    def source_stop(self) -> int:
        """The row after the last one it is taken from."""
        return self.source + self.stop - self.start


@dataclass(frozen=True, eq=False)
class Resumption:
    """What a prompt takes over: its fixed head, and what its conversation has."""

    # As it is computed: its first rows resumed, and among the chunks after them the runs of tokens that stood elsewhere.
    layout: PromptLayout
    # How many of the resumed rows are those of the prompt's fixed head: all or none.
    head: int
    # Of the resumed rows and of each run, by the rows that they begin at.
    readers: dict[int, KVReader] = field(default_factory=dict)
    # Ascending.
    runs: tuple[Run, ...] = ()
    # The turn before, in a conversation.
    held: HeldTurn | None = None

    @property
    def continued(self) -> int:
        """How many first rows the prompt has from the previous turn."""
        return self.layout.resumed_rows - self.head

    @property
    def moved(self) -> int:
        """How many tokens have their KV from another place in the previous turn."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt have their KV from the conversation."""
        return self.continued + self.moved


class Conversation:
    """The KV of a conversation's last turn, prompt and answer, from which the next turn continues.

    Made by `BlendEngine.conversation`, and passed to each of its turns. What a turn reuses is found by token ids alone:

    - The tokens that both turns begin with keep their KV unchanged. None of them is computed, loaded or selected again.
    - Other runs of tokens that the previous turn had elsewhere, such as the history of a chat after another context, are moved
      and blended as chunks are, by the selector and at the ratio of the turn.
    - All others are computed, as is an answer whose thoughts the template takes out; chunks come from the store, as always.

    The KV of a row is exact if the row was computed and all rows before it are exact. If a turn is prefilled in full, as at
    ``recompute_ratio=1``, only the exact rows that both turns begin with are reused, so that the turn has the answer of the
    model's own ``generate``, within rounding. Otherwise, first rows that are not exact are reused too, if they were made at no
    lower ratio, with the same selector and options. With ``selector="none"`` the ratio is 0, whatever the setting says.

    A row that was computed after a chunk knows of it. When a chunk is deleted or replaced, by any process, or a prompt brings it
    with another text, every row that may know of it is dropped: at once by the engine that deletes it, otherwise before the next
    turn; also when the time to live that its KV had left (`ttl_s`) as the first of these turns used it is over. A chunk that came
    without an id cannot be deleted; what follows one whose id is not known, or for another text, is computed anew.

    Nothing is reused by or kept of prompts that give positions, nor if the model cannot be blended, nor where an attachment drops
    rows (`SnapKV`). All conversations of an engine together keep no more than its setting ``conversation_bytes`` between turns;
    the one that has been idle longest is forgotten first, as a whole.

    Parameters
    ----------
    kept : KeptTurns
        Where its engine keeps the turns of all conversations.
    max_bytes : int, optional
        Maximum bytes of KV of this conversation, by default those of all together; of a longer turn, the first rows are kept.

    Raises
    ------
    ConfigError
        If that is negative.
    """

    def __init__(self, kept: KeptTurns, max_bytes: int | None = None) -> None:
        self.max_bytes = kept.limit_bytes if max_bytes is None else max_bytes
        if self.max_bytes < 0:
            raise ConfigError(f"max_bytes={max_bytes} is negative; give a number of bytes, 0 to keep nothing")
        self._kept = kept
        self._resets = 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds KV of."""
        held = self._kept.get(self)
        return 0 if held is None else len(held.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of KV it holds, where the model computes."""
        held = self._kept.get(self)
        return 0 if held is None else held.nbytes

    def reset(self) -> None:
        """Forget everything; turns that have been requested so far, running or waiting, keep nothing either."""
        with self._kept.lock:
            self._resets += 1
            self._kept.drop(self)

    def refresh(self) -> None:
        """Drop every row that may know of a chunk that was deleted or replaced, or has expired."""
        self._kept.fresh(self, {})


class Turn:
    """A turn of a conversation on its way: what it takes over of the previous turn, and what it leaves to the next one.

    It is made when the turn is asked for; what is reset from then on forgets this turn too. `ConfigError` if the conversation is
    none of the engine that keeps its turns there.
    """

    def __init__(self, conversation: Conversation, kept: KeptTurns) -> None:
        if not isinstance(conversation, Conversation) or conversation._kept is not kept:
            raise ConfigError(
                f"{conversation!r:.60} is no conversation, or belongs to another engine; start one with engine.conversation()"
            )
        self._conversation = conversation
        self._kept = kept
        self._resets = conversation._resets
        # When the KV of the prompt's chunks is over, by `time.time` and by their keys.
        self._expiry: dict[str, float] = {}

    def begin(self, prompt: AssembledPrompt, store: KnownChunks, ttl_s: float | None) -> None:
        """Note, before it is opened, until when the KV of the prompt's chunks may be used; `ttl_s` is for what is not stored."""
        keys = list({chunk.key: None for chunk in (*prompt.chunks, *prompt.computed)})
        default, now = math.inf if ttl_s is None else ttl_s, time.time()
        for key, life in zip(keys, store.lifetimes(keys), strict=True):
            # What is computed with the prompt should live no longer than what is stored of it.
            self._expiry[key] = now + (default if life is None else life)

    def resume(self, prompt: AssembledPrompt, asked: Making | None, *, moves: bool, head: int = 0) -> Resumption | None:
        """Return what a prompt takes over, or None; `moves` also from elsewhere; `head` first rows are at hand in any case.

        `asked` is how it makes its own rows, None where it is prefilled in full.
        """
        held = self._kept.fresh(
            self._conversation,
            {part.id: part.key for part in (*prompt.chunks, *prompt.computed) if part.id is not None},
        )
        if held is None or prompt.places is not None:
            return None
        layout = prompt.layout
        # The last row is computed: its logits are what the prompt is for.
        end = len(layout) - 1
        pairs = zip(held.token_ids, layout.token_ids[:end], strict=False)
        rows = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        others = held.making
        if asked is None or (others is not None and not others.serves(asked)):
            rows = min(rows, held.exact)
        if asked is not None:
            # A chunk that is held in part comes from the store whole.
            rows = min([rows, *(span.start for span in layout.chunks if span.start < rows < span.stop)])
        if rows < _LEAST_RUN:
            rows = 0
        first = max(rows, head)
        head = head if head > rows else 0
        later = tuple(span for span in layout.chunks if span.start >= first)
        runs = tuple(_find_runs(held, layout.token_ids, _gaps(first, later, end), rows)) if moves else ()
        if not runs and (head or not rows):
            return None
        spans = [*later, *(ChunkSpan(run.start, run.stop, run.start) for run in runs)] if asked is not None else []
        spans.sort(key=lambda span: span.start)
        return Resumption(
            replace(layout, chunks=tuple(spans), resumed_rows=first),
            head,
            _readers_of(held, runs if head else (Run(0, rows, 0), *runs)),
            runs,
            held,
        )

    def keep(
        self,
        prompt: AssembledPrompt,
        output_ids: Sequence[int],
        layers: list[LayerKV],
        resumption: Resumption | None,
        making: Making | None,
    ) -> None:
        """Hold an ended turn with the KV of all it has read instead of the one before; `making` is None of a full prefill."""
        if prompt.places is not None:
            return
        ids = (prompt.layout.token_ids + tuple(output_ids))[: layers[0].keys.shape[2]]
        resumed = 0 if resumption is None else resumption.continued
        before = None if resumption is None else resumption.held
        exact, made = len(ids), making
        if making is not None:
            spans = prompt.layout.chunks if resumption is None else resumption.layout.chunks
            exact = min([exact, *(span.start for span in spans)])
        if before is not None and before.making is not None and making is not None and resumed > before.exact:
            exact, made = before.exact, replace(making, ratio=min(making.ratio, before.making.ratio))
        turn = HeldTurn(ids, layers, exact, made, len(prompt.layout), _seen_by(prompt, resumption, self._expiry))
        limit = min(self._conversation.max_bytes, self._kept.limit_bytes)
        room = min(limit // turn.row_bytes, len(ids) - 1)
        held = turn if turn.nbytes <= limit else turn.cut(room)
        with self._kept.lock:
            if self._conversation._resets == self._resets:
                self._kept.keep(self._conversation, held)


def _gaps(start: int, spans: Sequence[ChunkSpan], end: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of rows from `start` to `end` that are in no span."""
    for span in spans:
        yield start, min(span.start, end)
        start = span.stop
    yield start, end


def _find_runs(turn: HeldTurn, wanted: Sequence[int], gaps: Iterator[tuple[int, int]], after: int) -> Iterator[Run]:
    """Yield runs of `wanted` in the gaps that a turn has from row `after` on, in one order and each row used once at most."""
    # A chat only grows, so a question that is asked a second time finds nothing left of the first time, and is computed. What
    # was generated knows of all that was generated before it, and is found with that alone.
    held = turn.token_ids
    places: dict[tuple[int, ...], list[int]] = {}
    for row in range(after, min(len(held) - _LEAST_RUN + 1, turn.given)):
        places.setdefault(tuple(held[row : row + _LEAST_RUN]), []).append(row)
    for start, end in gaps:
        row = start
        while row + _LEAST_RUN <= end:
            found = places.get(tuple(wanted[row : row + _LEAST_RUN]), [])
            place = bisect_left(found, after)
            if place == len(found):
                row += 1
                continue
            source = found[place]
            length = _LEAST_RUN
            while row + length < end and source + length < len(held) and held[source + length] == wanted[row + length]:
                length += 1
            yield Run(row, row + length, source)
            row, after = row + length, source + length


def _readers_of(held: HeldTurn, runs: Sequence[Run]) -> dict[int, KVReader]:
    """Return a reader of each run, by the row that it begins at in the prompt."""
    # Layers are put together in another stream than that in which the KV was computed.
    devices = {layer.keys.device for layer in held.layers}
    done = {device: event_now(device) for device in devices} if runs else {}
    readers: dict[int, KVReader] = {}
    for run in runs:
        rows = slice(run.source, run.source_stop)
        uploads = [
            Upload(LayerKV(*(tensor[0, :, rows] for tensor in layer)), done[layer.keys.device]) for layer in held.layers
        ]
        readers[run.start] = DeviceReader(ResidentKV(held.token_ids[rows], run.source, uploads))
    return readers


def _seen_by(
    prompt: AssembledPrompt, resumption: Resumption | None, expiry: Mapping[str, float]
) -> dict[tuple[str | None, str], Seen]:
    """Return the first row of this turn that may know of each chunk, and when that is over, in an earlier turn or in this one."""
    seen: dict[tuple[str | None, str], Seen] = {}
    if resumption is not None and resumption.held is not None:
        resumed = resumption.continued
        for known, before in resumption.held.seen.items():
            first = before.row
            rows = [run.start + max(first - run.source, 0) for run in resumption.runs if run.source_stop > first]
            if first < resumed or rows:
                seen[known] = Seen(first if first < resumed else min(rows), before.expires_at)
    for chunk in (*prompt.chunks, *prompt.computed):
        name, over = (chunk.id, chunk.key), expiry.get(chunk.key, math.inf)
        # One without an id cannot be deleted; it can only be over.
        if chunk.id is not None or over < math.inf:
            first_seen = seen.get(name, Seen(chunk.start))
            seen[name] = Seen(min(chunk.start, first_seen.row), min(over, first_seen.expires_at))
    return seen
