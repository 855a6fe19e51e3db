"""Random damage to a store's chunk files and folder, under a live engine and before opening.

Each trial begins with a copy of a sound store, from which two documents had been deleted, and damages it from outside, as a
failing disk or a careless administrator would. Every question must be answered, with the token ids that the sound store gave; a
chunk whose file is undamaged must be a hit; what was deleted must not come back. Then the store is opened again, and must be
clean after one `check_store(repair=True)`.

A folder that by design is not opened (the mark of another version, or of something else) counts as answered if it is refused as
that, with nothing changed, and an engine without it answers the same.
"""

import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store
from tests.core.documents.naive import small_model
from tests.families import tiny_tokenizer, words

DOCUMENTS = 5
# Those of them that were deleted.
GONE = (3, 4)
PIECES = 4
LIVE = [f"d{document}-{piece}" for document in range(DOCUMENTS) for piece in range(PIECES) if document not in GONE]
# What is run to damage a file: closing it here would give up the locks that SQLite holds for this process.
WRITE = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(bytes.fromhex(sys.argv[3]))"
CUT = "import sys; open(sys.argv[1], 'r+b').truncate(int(sys.argv[2]))"


def chunk(id: str, aware: bool) -> Chunk:
    """Return a chunk as it was added; where it is not read in its document, it is of none."""
    document, piece = int(id[1]), int(id[3])
    text = words(6 + piece, 10 * document + piece)
    return Chunk(text, id, document=f"d{document}", start=100 * piece) if aware else Chunk(text, id)


def opened(folder: Path | None) -> BlendEngine:
    settings = engine_settings(recompute_ratio=0.0, selector="none", self_check=False)
    settings["config"] = settings["config"].replace(ram_bytes=10**6 if folder is None else 0)
    return BlendEngine(small_model(), tiny_tokenizer(), **settings, store=folder)


def prompts(aware: bool) -> list[BlendPrompt]:
    chosen = (["d0-1", "d2-3", "d1-0"], ["d2-0", "d0-0", "d0-3", "d1-2"], LIVE[::-1])
    return [
        BlendPrompt(words(3, 70 + number), ids if aware else [chunk(id, aware) for id in ids], words(4, 80 + number))
        for number, ids in enumerate(chosen)
    ]


def ask(engine: BlendEngine, aware: bool) -> tuple[list[tuple[int, ...]], int]:
    """Ask all questions; return the answers, and how many chunks were misses."""
    results = [engine.generate(prompt, 6) for prompt in prompts(aware)]
    engine.flush()
    return [tuple(result.token_ids) for result in results], sum(result.report.misses for result in results)


@cache
def sound(aware: bool) -> tuple[Path, list[tuple[int, ...]], set[str]]:
    """Return a sound store, its answers, and the keys of what was deleted."""
    folder = Path(tempfile.mkdtemp(prefix="damage-")) / "store"
    everything = [f"d{document}-{piece}" for document in range(DOCUMENTS) for piece in range(PIECES)]
    with opened(folder) as engine:
        engine.add([chunk(id, aware) for id in everything])
    with opened(folder) as engine:
        gone = [id for id in everything if id not in LIVE]
        keys = {record.key for record in engine.records(gone) if record is not None}
        engine.delete(gone)
        assert len(keys) == len(gone)
        answers, misses = ask(engine, aware)
        assert misses == 0
    return folder, answers, keys


def elsewhere(script: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", script, *map(str, arguments)], check=True)


class Trial:
    """One damaged store, and whether it is to be `refused`."""

    def __init__(self, number: int, home: Path) -> None:
        self.chance = random.Random(number)
        self.aware = number % 2 == 0
        self.is_live = self.chance.random() < 0.5
        self.deeds: list[str] = []
        self.refused = False
        source, self.answers, self.gone = sound(self.aware)
        self.source = source
        self.folder = home / "store"
        shutil.copytree(source, self.folder)

    def damage(self) -> None:
        """Do one or two things to it."""
        ways: list[Callable[[], None]] = [self.chunks, self.chunks, self.part, self.mark, self.foreign]
        for way in self.chance.sample(ways, self.chance.choice((1, 1, 2))):
            way()
            if self.refused:
                return

    def chunks(self) -> None:
        for path in self.chance.sample(sorted(self.folder.glob("kv/*/*.safetensors")), self.chance.randint(1, 3)):
            self.spoil(path)

    def part(self) -> None:
        parts = (str(path.relative_to(self.folder)) for path in self.folder.glob("kv/*"))
        names = ["kv", "tmp", "reserve", "store.lock", *parts]
        path = self.folder / self.chance.choice(names)
        self.deeds.append(f"rm -r {path.name}")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def mark(self) -> None:
        path = self.folder / "store.json"
        way = self.chance.choice(["gone", "empty", "cut", "version", "foreign"])
        text = path.read_text()
        if way == "gone":
            path.unlink()
        else:
            news = {"empty": "", "cut": text[: len(text) // 2], "version": text.replace("3", "9"), "foreign": "{}"}
            path.write_text(news[way])
        self.deeds.append(f"{way} store.json")
        self.refused = self.refused or (way in ("version", "foreign") and not self.is_live)

    def foreign(self) -> None:
        for place in (".", "kv", "tmp", "kv/00"):
            (self.folder / place).mkdir(exist_ok=True, parents=True)
            (self.folder / place / "notes.txt").write_text("not ours")
        stray = self.chance.choice(sorted(self.folder.glob("kv/*/*.safetensors")))
        shutil.copy(stray, self.folder / "kv" / "00" / f"{'0' * 40}.safetensors")
        self.deeds.append("foreign files")

    def spoil(self, path: Path) -> None:
        """Overwrite, cut or delete a file, or flip bits of a chunk's."""
        if not path.exists():
            return
        size = path.stat().st_size
        way = self.chance.choice(["zero", "cut", "delete", "flip"]) if size else "delete"
        page = self.chance.randrange(size // 4096 + 1) * 4096
        if way == "flip":
            for _ in range(self.chance.randint(1, 12)):
                at = self.chance.randrange(size)
                elsewhere(WRITE, path, at, f"{self.chance.randrange(256):02x}")
        elif way == "zero":
            elsewhere(WRITE, path, page, bytes(min(4096, size - page)).hex())
        elif way == "cut":
            elsewhere(CUT, path, self.chance.randrange(size))
        else:
            path.unlink()
        self.deeds.append(f"{way} {path.name[-24:]}")

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.glob("kv/*/*.safetensors")}

    def run(self) -> list[str]:
        """Return what was wrong."""
        before = self.files()
        engine = None
        if self.is_live:
            engine = opened(self.folder)
            if self.chance.random() < 0.5:
                ask(engine, self.aware)
            # Something in the log, which says nothing new.
            engine.add([chunk(id, self.aware) for id in LIVE[:2]])
        self.damage()
        after = self.files()
        damaged = sum(after.get(name) != data for name, data in before.items())
        if self.refused:
            return self.see_refusal()
        wrong = []
        engine = engine or opened(self.folder)
        answers, misses = ask(engine, self.aware)
        wrong += self.differences(answers, "at once")
        # Each file is one chunk, of at most all questions; once computed it is a hit.
        if misses > damaged:
            wrong.append(f"{misses} misses, but {damaged} files damaged")
        engine.close()
        if any("store.json" in deed for deed in self.deeds):
            # A live engine does not look at it any more; another is told.
            shutil.copy(self.source / "store.json", self.folder)
        with opened(self.folder) as engine:
            answers, misses = ask(engine, self.aware)
            wrong += self.differences(answers, "when opened again")
            if misses:
                wrong.append(f"{misses} misses when opened again")
            back = [id for id in engine.ids() if id not in LIVE]
            if back or any(engine._store.holds(sorted(self.gone))):
                wrong.append(f"{back or 'KV'} was deleted and is back")
        check_store(self.folder, repair=True)
        problems = [problem for problem in check_store(self.folder).problems if "notes.txt" not in problem]
        return wrong + problems

    def see_refusal(self) -> list[str]:
        data = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        try:
            opened(self.folder).close()
        except StoreError as error:
            if not any(word in str(error) for word in ("version", "not written by", "is not a store")):
                return [f"refused as {error}"]
        else:
            return ["it was opened"]
        if data != {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}:
            return ["what was refused was changed"]
        with opened(None) as engine:
            engine.add([chunk(id, self.aware) for id in LIVE])
            return self.differences(ask(engine, self.aware)[0], "without it")

    def differences(self, answers: list[tuple[int, ...]], when: str) -> list[str]:
        count = sum(answer != right for answer, right in zip(answers, self.answers, strict=True))
        return [f"{count} other answers {when}"] if count else []


def run(count: int) -> list[str]:
    """Try so much damage; return what was wrong with any."""
    found: list[str] = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as home:
            trial = Trial(number, Path(home))
            try:
                wrong = trial.run()
            except Exception:
                wrong = [traceback.format_exc().strip().replace("\n", " | ")[-700:]]
        how = f"{'live' if trial.is_live else 'closed'}: {', '.join(trial.deeds)}"
        found += [f"{number}, {how}: {each}" for each in wrong]
    return found
