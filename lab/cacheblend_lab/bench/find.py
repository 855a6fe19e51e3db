"""Finding stored chunks in plain prompts: what it adds to a call, and what keeping their texts in mind costs."""

from __future__ import annotations

import hashlib
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_lab.bench.runner import Bench, Say, percentiles, say_nothing, seconds_of
from cacheblend_lab.bench.settings import FindSetting
from cacheblend_lab.bench.shapes import made_up_word
from cacheblend_lab.reference import load_model, load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag.chat.catalog import ChunkCatalog
from cacheblend_rag.chunk import Chunk, Segment, text_hash
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.store import NodeRecord

__all__ = ["FindBench", "FindRow"]

_HEADING = "# The same heading over every chunk\n\n"
_MOST_PLACED = 16
_ROWS_AT_ONCE = 5000


@dataclass(frozen=True, slots=True)
class FindRow:
    """The figures.

    Attributes
    ----------
    chunks : int
        Stored chunks.
    heading : bool
        Whether all begin with the same line.
    open_s : float
        Seconds of the first prompt, when every text is decoded and taken in.
    rss_bytes : int
        How much more memory the process holds at its most during that than before.
    placed, found : int
        Chunks that stand in the prompts, and those of them that were found.
    edited, false_hits : int
        Chunks with one character changed that stand there, and what was taken for a chunk without being one.
    mean_prompt_chars : float
        Characters of the prompts.
    p50_s, p99_s, max_s : float
        Seconds that finding adds to a call, looking the found chunks up included.
    after_add_s, after_other_s, after_delete_s : float
        The same for the first prompt after this engine added a chunk, another engine on the folder did, and a hundred chunks were
        deleted.
    """

    chunks: int
    heading: bool
    open_s: float
    rss_bytes: int
    placed: int
    found: int
    edited: int
    false_hits: int
    mean_prompt_chars: float
    p50_s: float
    p99_s: float
    max_s: float
    after_add_s: float
    after_other_s: float
    after_delete_s: float


class FindBench(Bench[FindSetting, FindRow]):
    """A store of the reference model with the names of many chunks, whose KV is not computed."""

    def __init__(self, setting: FindSetting) -> None:
        super().__init__(setting)
        self._random = random.Random(setting.seed)
        self._words = [made_up_word(self._random) for _ in range(3000)]
        self._tokenizer = load_tokenizer()
        self._model = load_model()
        start = _HEADING if setting.heading else ""
        self.texts = [start + self._text(self._random.randint(200, 1500)) for _ in range(setting.chunks)]

    def _text(self, chars: int) -> str:
        return " ".join(self._random.choices(self._words, k=chars // 3 + 2))[:chars]

    def measure(self, say: Say = say_nothing) -> list[FindRow]:
        with tempfile.TemporaryDirectory() as folder, self._engine(folder) as engine, self._engine(folder) as other:
            say("naming the chunks")
            self._name(engine)
            catalog = ChunkCatalog()
            say("taking their texts in")
            before = _peak_bytes()
            text = self._text(self.setting.prompt_chars)
            open_s = seconds_of(lambda: _split(catalog, engine, text))
            rss_bytes = _peak_bytes() - before
            say("looking through the prompts")
            times: list[float] = []
            placed = found = edited = false_hits = chars = 0
            for _ in range(self.setting.prompts):
                prompt, numbers, changed = self._prompt()
                began = time.perf_counter()
                segments = _split(catalog, engine, prompt)
                times.append(time.perf_counter() - began)
                hits = [segment for segment in segments if isinstance(segment, Chunk)]
                true = [hit for hit in hits if self.texts[int(hit.id or -1)] == hit.text]
                wanted = [str(number) for number in numbers]
                placed, edited = placed + len(wanted), edited + changed
                found += len(wanted) if [hit.id for hit in true] == wanted else len({*wanted} & {h.id for h in true})
                false_hits += len(hits) - len(true)
                chars += len(prompt)
            say("changing chunks")
            engine.add([Chunk(self._text(500), "own")])
            after_add_s = self._next_call(catalog, engine)
            other.add([Chunk(self._text(500), "another's")])
            after_other_s = self._next_call(catalog, engine)
            engine.delete([str(number) for number in range(100)])
            after_delete_s = self._next_call(catalog, engine)
        p50_s, p99_s, max_s = percentiles(times)
        row = FindRow(
            chunks=self.setting.chunks,
            heading=self.setting.heading,
            open_s=open_s,
            rss_bytes=rss_bytes,
            placed=placed,
            found=found,
            edited=edited,
            false_hits=false_hits,
            mean_prompt_chars=chars / self.setting.prompts,
            p50_s=p50_s,
            p99_s=p99_s,
            max_s=max_s,
            after_add_s=after_add_s,
            after_other_s=after_other_s,
            after_delete_s=after_delete_s,
        )
        return [row]

    def title(self, rows: Sequence[FindRow]) -> str:
        chars = rows[0].mean_prompt_chars
        return f"{self.setting.chunks:,} chunks, {self.setting.prompts} prompts of {chars:,.0f} characters on average"

    def cells(self, row: FindRow) -> dict[str, Any]:
        return {
            "found": f"{row.found} of {row.placed}",
            "taken by mistake": f"{row.false_hits}, of {row.edited} with one character changed",
            "added to a call, median": say_seconds(row.p50_s),
            "added to a call, 99 %": say_seconds(row.p99_s),
            "added to a call, most": say_seconds(row.max_s),
            "first call": say_seconds(row.open_s),
            "memory": say_bytes(row.rss_bytes),
            "first call after a chunk was added": say_seconds(row.after_add_s),
            "first call after another engine added one": say_seconds(row.after_other_s),
            "first call after 100 were deleted": say_seconds(row.after_delete_s),
        }

    def table(self, rows: Sequence[FindRow]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return the figures of the one row, one a line."""
        return ("", "figure"), list(self.cells(rows[0]).items())

    def _next_call(self, catalog: ChunkCatalog, engine: BlendEngine) -> float:
        prompt = self._prompt()[0]
        return seconds_of(lambda: _split(catalog, engine, prompt))

    def _engine(self, folder: str) -> BlendEngine:
        settings = engine_settings(self_check=False)
        return BlendEngine(self._model, self._tokenizer, store=folder, **settings)

    def _name(self, engine: BlendEngine) -> None:
        for start in range(0, len(self.texts), _ROWS_AT_ONCE):
            texts = self.texts[start : start + _ROWS_AT_ONCE]
            ids: Sequence[Sequence[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            engine._store.name(
                engine.namespace,
                [
                    NodeRecord(str(start + number), _key(start + number), text_hash(text), tuple(tokens))
                    for number, (text, tokens) in enumerate(zip(texts, ids, strict=True))
                ],
            )

    def _prompt(self) -> tuple[str, list[int], int]:
        """Return a prompt, the chunks that stand in it, in order, and how many edited ones do."""
        # Not one of those that are deleted in the end.
        first = min(100, self.setting.chunks - _MOST_PLACED)
        numbers = [
            self._random.randrange(first, self.setting.chunks) for _ in range(self._random.randint(0, _MOST_PLACED))
        ]
        parts: list[str] = []
        for number in numbers:
            parts += [self._text(100), self.texts[number], self._text(100), self._edited()]
        parts.append(self._text(max(100, self.setting.prompt_chars - sum(map(len, parts)))))
        return "\n\n".join(parts), numbers, len(numbers)

    def _edited(self) -> str:
        text = self.texts[self._random.randrange(len(self.texts))]
        place = self._random.randrange(len(text))
        return text[:place] + ("x" if text[place] != "x" else "y") + text[place + 1 :]


def _key(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=20).hexdigest()


def _peak_bytes() -> int:
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _split(catalog: ChunkCatalog, engine: BlendEngine, text: str) -> list[Segment]:
    catalog.follow(engine)
    return catalog.split(engine, text)
