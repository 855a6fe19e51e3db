"""Damage, kills and ingestions that end half-way: what is damaged is a miss, never an answer, and nothing is lost or left.

What is damaged is damaged from outside, as a failing disk or a careless administrator would.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import NodeRecord
from tests.core.documents.naive import Library, Rows, small_model
from tests.core.documents.texts import Text
from tests.engines import evict
from tests.families import tiny_tokenizer, words
from tests.faults import documents, ingestions
from tests.limits import one_thread as one_thread
from tests.store.kit import start

WHOLE = [pytest.mark.full, pytest.mark.timeout(1800)]
# What is run to damage a file: closing it here would give up the locks that SQLite holds for this process.
WRITE = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(bytes.fromhex(sys.argv[3]))"
CUT = "import sys; open(sys.argv[1], 'r+b').truncate(int(sys.argv[2]))"

TEXTS = [Text.of(f"d{number}", [5, 6, 4, 7], [2, 0, 1], number) for number in range(3)]
CHUNKS = [
    *(chunk for text in TEXTS for chunk in text.chunks),
    *(Chunk(words(6, 50 + number), f"e-{number}", document="e") for number in range(3)),
    Chunk("t5 t6", "alone"),
]
GONE = [Chunk(words(6, 90 + number), f"gone-{number}", document="gone") for number in range(4)]


def opened(folder: Path) -> BlendEngine:
    settings = engine_settings(recompute_ratio=0.0, selector="none", ram_bytes=0, self_check=False)
    return BlendEngine(small_model(), tiny_tokenizer(), **settings, store=folder)


def prompts() -> list[BlendPrompt]:
    chosen = (["d0-1", "d2-3", "d1-0"], ["d2-0", "alone", "d0-3", "e-2"], [str(chunk.id) for chunk in CHUNKS][::-1])
    return [BlendPrompt(words(3, 70 + n), ids, words(4, 80 + n)) for n, ids in enumerate(chosen)]


def ask(engine: BlendEngine) -> tuple[list[tuple[int, ...]], int]:
    """Ask all questions; return the answers, and how many chunks were misses."""
    results = [engine.generate(prompt, 6) for prompt in prompts()]
    engine.flush()
    return [result.token_ids for result in results], sum(result.report.misses for result in results)


class Sound:
    """A sound store, from which a document was deleted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with opened(folder) as engine:
            engine.add([*CHUNKS, *GONE])
            engine.delete([str(chunk.id) for chunk in GONE])
            self.answers, misses = ask(engine)
            assert misses == 0
            self.keys = {record.id: record.key for record in engine.records(engine.ids()) if record is not None}

    @cached_property
    def is_right(self) -> Callable[[BlendEngine, NodeRecord], bool]:
        """Whether what is stored of a chunk is what a plain forward over what it is read behind gives."""
        library, rows = Library(()), Rows(small_model())
        library.add(CHUNKS, float("inf"))
        readings = library.readings(0.0)

        def is_right(engine: BlendEngine, record: NodeRecord) -> bool:
            own = readings[record.id]
            later = own if record.later is None else replace(own, context=record.later.behind)
            return all(rows.is_right(engine, key, each) for key, each in zip(record.keys, (own, later), strict=False))

        return is_right


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound") / "store")


def elsewhere(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", script, *map(str, arguments)], check=True)


def spoil(path: Path, chance: random.Random) -> None:
    """Lose a page of a file, all from somewhere on or the file, or flip bits."""
    size = path.stat().st_size
    page = chance.randrange(size // 4096 + 1) * 4096
    way = chance.choice(["zero", "cut", "flip", "delete"])
    if way == "zero":
        elsewhere(WRITE, path, page, bytes(min(4096, size - page)).hex())
    elif way == "cut":
        elsewhere(CUT, path, chance.randrange(size))
    elif way == "flip":
        elsewhere(WRITE, path, chance.randrange(size), f"{chance.randrange(256):02x}")
    else:
        path.unlink()


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=WHOLE)])
def test_damaged_chunks_are_misses_and_computed_anew(tmp_path: Path, sound: Sound, count: int) -> None:
    for number in range(count):
        chance, folder = random.Random(number), tmp_path / str(number)
        shutil.copytree(sound.folder, folder)
        # Under an engine that is at work, or before one is opened.
        engine = opened(folder) if number % 2 else None
        files = sorted(folder.glob("kv/*/*.safetensors"))
        damaged = chance.sample(files, chance.randint(1, 3))
        for path in damaged:
            spoil(path, chance)
        if chance.random() < 0.5:
            part = chance.choice([*folder.glob("kv/*"), folder / "tmp"])
            damaged += [path for path in files if path.parent == part and path not in damaged]
            shutil.rmtree(part)
        # Files of others, and one under a name that is none.
        (folder / "kv" / "00").mkdir(exist_ok=True)
        (folder / "kv" / "notes.txt").write_text("not ours")
        shutil.copy(next(folder.glob("kv/*/*.safetensors")), folder / "kv" / "00" / f"{'0' * 40}.safetensors")
        for most in (len(damaged), 0):
            with engine or opened(folder) as engine:
                answers, misses = ask(engine)
                assert (answers, misses <= most) == (sound.answers, True), (number, misses)
                # Nothing that was deleted is back.
                assert sorted(engine.ids()) == sorted(sound.keys)
            engine = None


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=WHOLE)], ids=["sampled", "whole"])
def test_a_damaged_index_is_refused_or_right(tmp_path: Path, sound: Sound, count: int) -> None:
    """No chunk is served behind other text than its own."""
    chance, refused = random.Random(count), 0
    source = tmp_path / "source"
    shutil.copytree(sound.folder, source)
    with opened(source) as engine:
        # One is always missing, and has to be encoded.
        evict(engine, "d1-2")
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        index = folder / "index.sqlite"
        page = chance.randrange(index.stat().st_size // 4096) * 4096
        if chance.random() < 0.3:
            elsewhere(CUT, index, page + chance.randrange(4096))
        else:
            elsewhere(WRITE, index, page, bytes(4096).hex())
        try:
            with opened(folder) as engine:
                known = [record.id for record in engine.records(list(sound.keys)) if record is not None]
                if known:
                    engine.prefill(BlendPrompt("t5 t6", known, "t7 t8"))
                    engine.flush()
                assert all(
                    record.key == sound.keys[record.id] for record in engine.records(known) if record is not None
                )
                engine.add(CHUNKS)
                for text in TEXTS:
                    assert engine.document(text.name)[: len(text.cuts)] == [chunk.id for chunk in text.chunks]
                for record in engine.records(list(sound.keys)):
                    assert record is not None and sound.is_right(engine, record)
        except StoreError:
            refused += 1
        shutil.rmtree(folder)
    assert refused < count


def nothing_is_wrong(run: Callable[..., list[str]], *arguments: object) -> None:
    """See that a command finds nothing wrong, in a process that has no threads, since the command forks."""
    process = start(_run, run, *arguments)
    process.join()
    assert process.exitcode == 0


def _run(run: Callable[..., list[str]], *arguments: object) -> None:
    torch.set_num_threads(1)
    found = run(*arguments)
    assert found == [], found


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=WHOLE)])
@pytest.mark.parametrize("disk_bytes", [None, 12_000], ids=["unbounded", "evicting"])
def test_documents_are_not_stale_after_kills(tmp_path: Path, kills: int, disk_bytes: int | None) -> None:
    nothing_is_wrong(documents.run, tmp_path / "run", kills, disk_bytes)
    # Something was there to go stale.
    looked = [line for line in (tmp_path / "run.log").read_text().splitlines() if line.startswith("looked")]
    assert any(line != "looked 0" for line in looked)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=WHOLE)])
def test_nothing_is_left_and_nothing_lost_after_an_ingestion_is_killed(tmp_path: Path, kills: int) -> None:
    nothing_is_wrong(ingestions.run, tmp_path / "run", kills)
