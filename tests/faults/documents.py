"""kill -9 at random moments, while two processes add, replace and delete chunks of the same documents in one folder.

After each kill a process that has nothing in memory looks at what there is: all KV must be that of a plain forward over what the
documents say now, the documents in order, the index sound, and what had been deleted gone.
"""

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import UnknownChunkError
from cacheblend_rag.store import check_store
from tests.core.documents.naive import Library, Rows, later_of, small_model
from tests.engines import documents_of, evict
from tests.families import tiny_tokenizer
from tests.limits import apart

DOCUMENTS = ("d0", "d1")
# Chunks that both processes write, and those that one has for itself.
SHARED = (0, 2, 4, 6)
OWN = {0: (1, 5), 1: (3, 7)}
# Words of a chunk, and how many further on the next one begins.
SIZE, STEP = 7, 5


class Scene:
    """Where a run takes place: the store and the log of what the processes did."""

    def __init__(self, place: Path, disk_bytes: int | None) -> None:
        self.disk_bytes = disk_bytes
        self.folder = place.with_name(place.name + ".store")
        self.log = place.with_name(place.name + ".log")

    def note(self, *words: object) -> None:
        """Add a line to the log, whole, whoever else does."""
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)

    def lines(self) -> list[list[str]]:
        return [line.split(" ") for line in self.log.read_text().splitlines()] if self.log.exists() else []


def chunk(document: str, number: int, version: int) -> Chunk:
    """Return a chunk of a document; all words are of one length, so that every version stands at the same place."""
    chance = random.Random(f"{document}:{version}")
    text = [f"t{chance.randrange(10, 90)}" for _ in range(60)]
    begin = number * STEP
    return Chunk(" ".join(text[begin : begin + SIZE]), f"{document}-{number}", document=document, start=4 * begin)


def open_engine(scene: Scene) -> BlendEngine:
    settings = engine_settings(
        ram_bytes=20_000,
        disk_bytes=scene.disk_bytes,
        encode_batch_tokens=32,
        recompute_ratio=0.0,
        self_check=False,
    )
    return BlendEngine(small_model(), tiny_tokenizer(), **settings, store=scene.folder)


def flaws(engine: BlendEngine, rows: Rows) -> list[str]:
    """Return what is wrong with the documents of a store to which nobody writes, and with their KV."""
    found = []
    library = Library(())
    ids = engine.ids()
    records = {record.id: record for record in engine.records(ids) if record is not None}
    for id, document in zip(ids, documents_of(engine, ids), strict=True):
        if id not in records or document is None:
            return [f"{id} is damaged"]
        start = chunk(document, int(id[3:]), 0).start
        text = " ".join(f"t{token}" for token in records[id].token_ids)
        library.add([Chunk(text, id, document=document, start=start)])
    for document in DOCUMENTS:
        if engine.document(document) != [piece.id for piece in library.order(document)]:
            found.append(f"{document} is read as {engine.document(document)}")
    readings = library.readings()
    for id, reading in readings.items():
        try:
            later = later_of(engine, records[id], readings)
        except AssertionError as error:
            found.append(f"{id}: {error}")
            continue
        if not rows.is_right(engine, records[id].key, reading):
            found.append(f"{id} is stale")
        if later is not None and not rows.is_right(engine, records[id].keys[-1], later):
            found.append(f"{id} is stale behind others")
    return found


def use_until_killed(scene: Scene, worker: int, turn: int) -> None:
    """Add, replace, delete, evict and read without end."""
    chance = random.Random(f"{worker}:{turn}")
    engine = open_engine(scene)
    while True:
        document, version = chance.choice(DOCUMENTS), chance.randrange(3)
        number = chance.choice((*SHARED, *OWN[worker]))
        id = f"{document}-{number}"
        deed = chance.choice(["add", "add", "several", "later", "delete", "document", "ask", "ask", "evict"])
        if deed == "add":
            say(scene, worker, [id], f"add {version}", partial(engine.add, [chunk(document, number, version)]))
        elif deed == "several":
            numbers = chance.sample((*SHARED, *OWN[worker]), 4)
            given = [chunk(document, each, version) for each in numbers]
            say(scene, worker, [str(each.id) for each in given], f"add {version}", partial(engine.add, given))
        elif deed == "later":
            given = [chunk(document, each, version) for each in SHARED]
            engine.add(given, background=True)
        elif deed == "delete":
            say(scene, worker, [id], "delete", partial(engine.delete, [id]))
        elif deed == "document" and chance.random() < 0.3:
            # The other's own are left, so that they are as it says.
            gone = [each for each in engine.document(document) if whose(each) in (None, worker)]
            say(scene, worker, gone, "delete", partial(engine.delete, gone))
        elif deed == "ask":
            known = [each for each in engine.document(document) if chance.random() < 0.5]
            known = [record.id for record in engine.records(known) if record is not None]
            # The other may have deleted one of them since.
            with suppress(UnknownChunkError):
                if known:
                    engine.prefill(BlendPrompt("t5 t6", known, "t7 t8"))
        elif deed == "evict":
            evict(engine, id)


def whose(id: str) -> int | None:
    return next((worker for worker, numbers in OWN.items() if id[3:] in map(str, numbers)), None)


def say(scene: Scene, worker: int, ids: list[str], deed: str, do: Callable[[], object]) -> None:
    """Note of chunks that nobody else touches what is about to be done, and that it was."""
    own = [id for id in ids if whose(id) == worker]
    for id in own:
        scene.note("begin", id, deed)
    do()
    for id in own:
        scene.note("done", id, deed)


def look(scene: Scene) -> None:
    """Look at everything with nothing in memory, and note what is wrong."""
    engine = open_engine(scene)
    found = flaws(engine, Rows(small_model()))
    records = {record.id: record for record in engine.records(engine.ids()) if record is not None}
    last: dict[str, list[str]] = {}
    for line in scene.lines():
        if line[0] in ("begin", "done"):
            last[line[1]] = line
    for id, (state, _, deed, *version) in last.items():
        if state == "begin":
            continue
        record = records.get(id)
        if deed == "delete" and record is not None:
            found.append(f"{id} was deleted and is back")
        if deed == "add":
            text = chunk(id[:2], int(id[3:]), int(version[0])).text
            ids = tuple(int(word[1:]) for word in text.split())
            if record is None or record.token_ids != ids:
                found.append(f"{id} was added and is not there")
    engine.close()
    # Files go before their entries: a kill between the two leaves a miss.
    found += [each for each in check_store(scene.folder).problems if not each.endswith("is missing")]
    for flaw in found:
        scene.note("wrong", flaw)
    scene.note("looked", len(records))


def fork(scene: Scene, work: Callable[[], None]) -> int:
    """Do something in a process of its own, which notes how it failed, and return its id."""

    def noted() -> None:
        try:
            work()
        except BaseException:
            scene.note("wrong", traceback.format_exc().replace("\n", " | "))
            raise

    return apart(noted)


def run(place: Path, kills: int, disk_bytes: int | None) -> list[str]:
    """Go on until there were so many kills, beside a place; return what was wrong."""
    scene, chance = Scene(place, disk_bytes), random.Random(0)
    small_model()
    running: dict[int, int] = {}

    def kill(worker: int) -> None:
        os.kill(running[worker], signal.SIGKILL)
        os.waitpid(running.pop(worker), 0)

    for _ in range(kills):
        for worker in OWN:
            running[worker] = fork(scene, partial(use_until_killed, scene, worker, time.monotonic_ns()))
        # One goes on for a while without the other.
        for worker in chance.sample(list(OWN), len(OWN)):
            time.sleep(chance.uniform(0.3, 1.5))
            kill(worker)
        _, status = os.waitpid(fork(scene, partial(look, scene)), 0)
        if status or wrong(scene):
            break
    return wrong(scene)


def wrong(scene: Scene) -> list[str]:
    return [" ".join(line[1:]) for line in scene.lines() if line[0] == "wrong"]
