"""A soak test of one engine: callers ask, while documents change: ``python -m cacheblend_lab.soak MODEL``.

MODEL is a GGUF file or a folder for transformers. Each document of the corpus tells the code of a room. Callers ask for codes in
prompts of several documents, while another thread gives rooms new codes, and deletes documents and adds them anew. No answer may
know a code that was gone when its question was asked.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from cacheblend_lab.bench.runner import Figures, Row, cell, rss_bytes
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, say_bytes, show_table
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.errors import CacheBlendError, UnknownChunkError
from cacheblend_rag.store import check_store

_SENTENCES = 8
_SUBJECTS = "the gardener;a clerk;the night guard;an old teacher;the captain;a visitor;the baker;her cousin".split(";")
_VERBS = "painted repaired described carried forgot measured cleaned borrowed sold".split()
_OBJECTS = (
    "a wooden chair;the green lamp;two letters;the long ladder;a box of nails;the blue carpet;a brass clock".split(";")
)
_PLACES = "beside the river;behind the library;in the north wing;under the stairs;near the old mill".split(";")
_CITIES = (
    "Lisbon Oslo Cairo Lima Kyoto Dublin Vienna Quito Athens Delhi Madrid Prague Warsaw Havana Nairobi Seoul Boston Geneva Tunis "
    "Perth Bergen Turin Cork Porto Malmo Graz Split Riga Lyon Bath Kiel Ghent Basel Davos Siena Parma Hanoi Dakar Accra Tampa"
).split()
_FACTS = (
    "access code;invoice number;locker number;phone extension;badge number;ticket number;shelf mark;postal code;account number;"
    "serial number"
).split(";")
_CODE = re.compile(r"(?<!\d)\d{5}(?!\d)")
_ANSWER_TOKENS = 10
# Of a prompt, beside the one that is asked about; and of the corpus, that are deleted at a time.
_OTHERS, _MOST_GONE = (2, 3), 2
_SAMPLED_S, _TOLD_S, _SETTLED_S = 2.0, 60.0, 300.0
_EXAMPLES = 20


@dataclass
class _Code:
    """A code, whose it is, from when on an answer may know it, and since when none may."""

    room: int
    since: float
    until: float = float("inf")


class _Rooms:
    """What was true when: the codes of rooms, and when their documents were deleted, in seconds; of any thread."""

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.codes: dict[str, _Code] = {}
        self._unused = [f"{number}" for number in range(10000, 100000)]
        random.Random(0).shuffle(self._unused)
        self.present = set(range(count))
        # Of each room, when its document was or may have been deleted.
        self._gaps: dict[int, list[list[float]]] = {room: [] for room in range(count)}

    @contextmanager
    def changed(self, room: int, *, gap: bool = False, stays: bool = True) -> Iterator[str]:
        """Note that a room gets a new code, which is yielded, and that its document may be missing meanwhile, or from now on."""
        with self.lock:
            code, now = self._unused.pop(), time.monotonic()
            earlier = [each for each in self.codes.values() if each.room == room and each.until == float("inf")]
            if stays:
                self.codes[code] = _Code(room, now)
            if gap:
                self._gaps[room].append([now, float("inf")])
        yield code
        with self.lock:
            now = time.monotonic()
            for each in earlier:
                each.until = now
            if stays:
                self.present.add(room)
                if self._gaps[room]:
                    self._gaps[room][-1][1] = min(self._gaps[room][-1][1], now)
            else:
                self.present.discard(room)

    def choose(self, chance: random.Random) -> list[int]:
        """Return the room to be asked about, rarely one whose document is deleted, and others to stand in the prompt."""
        with self.lock:
            present = sorted(self.present)
            gone = sorted(set(self._gaps) - self.present)
        asked = chance.choice(gone) if gone and chance.random() < 0.05 else chance.choice(present)
        others = [each for each in present if each != asked]
        return [asked, *chance.sample(others, min(chance.choice(_OTHERS), len(others)))]

    def is_stale(self, text: str, began: float) -> bool:
        """Whether a text knows a code that was gone before."""
        with self.lock:
            return any(found in self.codes and self.codes[found].until < began for found in _CODE.findall(text))

    def is_right(self, text: str, room: int, began: float) -> bool:
        """Whether a text knows a code that the room had then or has had since."""
        with self.lock:
            known = [self.codes[found] for found in _CODE.findall(text) if found in self.codes]
        return any(each.room == room and each.until >= began for each in known)

    def may_miss(self, rooms: list[int], began: float, ended: float) -> bool:
        """Whether one of the documents may have been missing at some time between."""
        with self.lock:
            return any(start <= ended and stop >= began for room in rooms for start, stop in self._gaps[room])


def _chunks(room: int, code: str) -> list[Chunk]:
    """Return the two chunks of a room's document; only the first changes with the code."""
    chance = random.Random(room)
    sentences = [
        " ".join(chance.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)).capitalize()
        + " that morning."
        for _ in range(2 * _SENTENCES)
    ]
    first, second = sentences[:_SENTENCES], sentences[_SENTENCES:]
    first[_SENTENCES // 2] = f"{_fact(room)} {code}."
    texts = [" ".join(each) + "\n" for each in (first, second)]
    starts = (0, len(texts[0]))
    return [
        Chunk(text, id, document=f"room {room}", start=start)
        for text, id, start in zip(texts, _ids(room), starts, strict=True)
    ]


def _fact(room: int) -> str:
    """Return what is told of a room: things without much in common are easiest to tell apart for a small model."""
    turn, place = divmod(room, len(_CITIES))
    return f"The {_FACTS[place % len(_FACTS)]} of the {_CITIES[place]} room{f' on floor {turn}' if turn else ''} is"


def _ids(room: int) -> list[str]:
    return [f"{room}-0", f"{room}-1"]


def _prompt(asked: int, rooms: Sequence[int]) -> BlendPrompt:
    chunks = [ChunkRef(id) for room in rooms for id in _ids(room)]
    return BlendPrompt(segments=["Notes about rooms.\n\n", *chunks, f"\nWhat was noted? {_fact(asked)}"])


@dataclass(frozen=True)
class _Doubt:
    """An answer without a code that was valid: what was asked among which rooms, in the prompt's order, and when."""

    asked: int
    rooms: list[int]
    began: float
    result: GenerationResult


@dataclass
class _Soak:
    """One run: its engine, what is true, and what came of it."""

    engine: BlendEngine
    rooms: _Rooms
    pause_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    doubts: list[_Doubt] = field(default_factory=list)
    examples: list[Row] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def count(self, what: str) -> None:
        with self.rooms.lock:
            self.counts[what] += 1

    def ask_on(self, number: int) -> None:
        """Ask until the end."""
        chance = random.Random(1000 + number)
        while not self.stop.is_set():
            self._ask(chance)

    def _ask(self, chance: random.Random) -> None:
        rooms = self.rooms.choose(chance)
        shuffled = chance.sample(rooms, len(rooms))
        prompt = _prompt(rooms[0], shuffled)
        began = time.monotonic()
        try:
            result = self.engine.generate(prompt, _ANSWER_TOKENS, do_sample=False)
        except CacheBlendError as error:
            expected = isinstance(error, UnknownChunkError)
            expected = expected and self.rooms.may_miss(rooms, began, time.monotonic())
            self.count(f"{type(error).__name__}{'' if expected else ', unexpected'}")
            if not expected:
                self._note("error", rooms, str(error))
            return
        self.count("answers")
        text = self.engine.tokenizer.decode(result.prompt_ids)
        if self.rooms.is_stale(text, began) or self.rooms.is_stale(result.text, began):
            self.count("stale")
            self._note("stale", rooms, result.text, prompt=text)
        elif not self.rooms.is_right(result.text, rooms[0], began):
            self.count("doubtful")
            with self.rooms.lock:
                self.doubts.append(_Doubt(rooms[0], shuffled, began, result))

    def judge(self, full: BlendEngine, calm: BlendEngine, most: int) -> None:
        """Judge so many doubtful answers: wrong is what full prefill of the same prompt knows, and so does KV of the same
        chunks that is computed now, while nothing changes; what the latter does not know either, blending has lost.
        """
        for doubt in random.Random(2).sample(self.doubts, min(most, len(self.doubts))):
            prompt = BlendPrompt(segments=[doubt.result.prompt_ids])
            in_full = full.generate(prompt, _ANSWER_TOKENS, do_sample=False).text
            what, again = "unknown_to_full_prefill", ""
            if self.rooms.is_right(in_full, doubt.asked, doubt.began):
                found = set(_CODE.findall(full.tokenizer.decode(doubt.result.prompt_ids)))
                codes = {each.room: code for code, each in self.rooms.codes.items() if code in found}
                for room in doubt.rooms:
                    calm.add(_chunks(room, codes[room]))
                again = calm.generate(_prompt(doubt.asked, doubt.rooms), _ANSWER_TOKENS, do_sample=False).text
                what = "wrong" if self.rooms.is_right(again, doubt.asked, doubt.began) else "lost_by_blending"
            self.count(what)
            tiers = [each.tier for each in doubt.result.report.chunks]
            self._note(what, doubt.rooms, doubt.result.text, full=in_full, again=again, tiers=tiers)

    def _note(self, what: str, rooms: list[int], said: str, **facts: object) -> None:
        with self.rooms.lock:
            if what in ("wrong", "stale", "error") or len(self.examples) < _EXAMPLES:
                self.examples.append({"what": what, "rooms": rooms, "said": said, **facts})

    def change_on(self) -> None:
        """Change documents until the end, each in one of the ways in which frameworks do it."""
        chance = random.Random(1)
        gone: list[int] = []
        while not self.stop.wait(chance.uniform(0, 2 * self.pause_s)):
            way = chance.choice(("replace", "in background", "anew", "delete"))
            if len(gone) == _MOST_GONE or (way == "delete" and gone and chance.random() < 0.5):
                room = gone.pop(0)
                with self.rooms.changed(room) as code:
                    self.engine.add(_chunks(room, code))
                self.count("added anew")
                continue
            room = chance.choice(sorted(self.rooms.present))
            if way == "delete":
                with self.rooms.changed(room, gap=True, stays=False):
                    self.engine.delete(_ids(room))
                gone.append(room)
                self.count("deletes")
            else:
                self._update(room, way)
                self.count("updates")

    def _update(self, room: int, way: str) -> None:
        with self.rooms.changed(room, gap=way == "anew") as code:
            chunks = _chunks(room, code)
            if way == "anew":
                self.engine.delete_document(f"room {room}")
            job = self.engine.add(chunks, background=True) if way == "in background" else self.engine.add(chunks)
        if way == "in background":
            # From here on nobody may know the old code, though the new one's KV is still to come.
            self.engine.flush()
        del job

    def run(self, callers: int, seconds: float) -> None:
        """Let callers ask and documents change for so long; what ends early with an error is raised."""
        began = told = time.monotonic()
        with ThreadPoolExecutor(callers + 1) as pool:
            working = [pool.submit(self.ask_on, number) for number in range(callers)] + [pool.submit(self.change_on)]
            try:
                while (now := time.monotonic()) < began + seconds:
                    self.memory.append((now - began, rss_bytes()))
                    if now - told >= _TOLD_S:
                        told = now
                        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
                        memory = say_bytes(self.memory[-1][1])
                        typer.echo(f"{(now - began) / 60:.0f} min: {counts}; memory {memory}", err=True)
                    if wait(working, min(_SAMPLED_S, seconds / 10), FIRST_EXCEPTION).done:
                        break
            finally:
                self.stop.set()
        for each in working:
            each.result()

    def left_over(self, folder: Path) -> Row:
        """Return what is left of documents that were deleted, or of texts that were replaced; then delete all, and look again."""
        self.engine.flush()
        present = [id for room in self.rooms.present for id in _ids(room)]
        known = self.engine.ids()
        keys = {key for record in self.engine.records(known) if record is not None for key in record.keys}
        files = [file.stem for file in (folder / "kv").rglob("*.safetensors")]
        report = check_store(folder)
        row: Row = {
            "left_ids": len(set(known) ^ set(present)),
            "left_kv": len(set(files) - keys),
            "problems": len(report.problems),
        }
        self.engine.delete(known)
        stats = self.engine.store.stats()
        row["left_when_all_is_deleted"] = stats.nodes + stats.entries + stats.ram_bytes + stats.disk_bytes
        return row


def _memory(samples: list[tuple[float, int]], seconds: float) -> Row:
    """Return resident memory after the first minutes, and how much more there was later."""
    settled_s = min(_SETTLED_S, seconds / 3)
    settled = next((each for at, each in samples if at >= settled_s), samples[-1][1])
    last = mean(each for at, each in samples if at >= samples[-1][0] - settled_s)
    most = max(each for _, each in samples)
    return {
        "settled_rss_bytes": settled,
        "most_rss_bytes": most,
        "last_rss_bytes": round(last),
        "most_over_settled": most / settled,
        "last_over_settled": last / settled,
    }


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder of transformers.")],
    minutes: Annotated[float, typer.Option(help="How long callers ask.")] = 30,
    callers: Annotated[int, typer.Option(help="How many ask at once.")] = 4,
    documents: Annotated[int, typer.Option(help="Documents of two chunks.")] = 40,
    ram_mb: Annotated[int, typer.Option(help="The store's ram_bytes, in millions.")] = 64,
    disk_mb: Annotated[int, typer.Option(help="The store's disk_bytes, in millions.")] = 96,
    pause_s: Annotated[float, typer.Option(help="Seconds between two changes, on average.")] = 0.5,
    judged: Annotated[int, typer.Option(help="Doubtful answers that are compared with full prefill, at most.")] = 60,
    json_file: JsonOption = None,
) -> None:
    """Ask for facts while they change; exit status 1 if an answer is stale or wrong, or something deleted is left."""
    make_quiet()
    config = EngineConfig(ram_bytes=ram_mb * 10**6, disk_bytes=disk_mb * 10**6, prefix_bytes=64 * 10**6)
    with TemporaryDirectory(prefix="cacheblend-soak-") as temporary:
        folder = Path(temporary) / "kv"
        with BlendEngine.from_pretrained(model, config=config, store=folder) as engine:
            soak = _Soak(engine, _Rooms(documents), pause_s)
            for room in range(documents):
                with soak.rooms.changed(room) as code:
                    engine.add(_chunks(room, code))
            soak.run(callers, 60 * minutes)
            stats = engine.store.stats()
            row: Row = {"minutes": minutes, **_memory(soak.memory, 60 * minutes)}
            row |= {"disk_bytes": stats.disk_bytes, "evictions": stats.evictions, "ram_bytes": stats.ram_bytes}
            row |= {"ram_evictions": stats.ram_evictions, **soak.left_over(folder)}
            alone = EngineConfig(prefix_bytes=0)
            with (
                engine.another(config=alone, blend=BlendConfig(enabled=False)) as full,
                engine.another(config=alone, store=Path(temporary) / "calm") as calm,
            ):
                soak.judge(full, calm, judged)
    unexpected = sum(count for what, count in soak.counts.items() if what.endswith("unexpected"))
    row |= {"stale": 0, "wrong": 0, **soak.counts, "unexpected_errors": unexpected}
    row["over_disk_bytes"] = max(stats.disk_bytes - disk_mb * 10**6, 0)
    figures = Figures(f"{Path(model).name}, {callers} callers", [row], {"examples": soak.examples})
    # One row of many figures is a list on paper.
    show_table(figures.title, ("", ""), [(name, cell(name, value)) for name, value in row.items()])
    setting = {"callers": callers, "documents": documents, "ram_mb": ram_mb, "disk_mb": disk_mb, "pause_s": pause_s}
    figures.write(json_file, "soak", setting)
    failed = ("stale", "wrong", "unexpected_errors", "over_disk_bytes", "left_ids", "left_kv", "problems")
    if any(row[name] for name in (*failed, "left_when_all_is_deleted")):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
