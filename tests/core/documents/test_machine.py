"""No KV is stale: any sequence of calls by two engines on one folder, against a library that works everything out anew.

The model is small, so that after every step all that is stored is compared with a plain forward over what the chunk should be
encoded behind.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings, stateful
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import KVStore, check_store, open_store
from tests.core.documents.naive import Ids, Library, Reading, Rows, later_of, small_model
from tests.engines import documents_of, evict, separator_of, store_of
from tests.families import tiny_tokenizer, words

IDS = [f"c{number}" for number in range(7)]
# Two documents say the same, so that equal text stands behind equal text.
TEXTS = {"d0": words(30, 1).split(), "d1": words(30, 1).split(), "d2": words(30, 2).split()}
HEAD = "t90 t91 "
SOME_IDS = st.lists(st.sampled_from(IDS), max_size=3, unique=True)
# Only met in prompts.
MET = {f"m{number}": words(9, 3 + number) for number in range(2)}


@cache
def rows() -> Rows:
    return Rows(small_model())


@st.composite
def chunks(draw: st.DrawFn, *, placed: bool) -> Chunk:
    """Draw a chunk: a stretch of a document, at its place there or without one, or a text of none."""
    id = draw(st.sampled_from(IDS))
    document = draw(st.sampled_from([*TEXTS, None]))
    begin, size = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    text = TEXTS[document or "d0"]
    body = " ".join(text[begin : begin + size])
    if document is None:
        return Chunk(body, id)
    head = draw(st.sampled_from(["", "", HEAD]))
    start = [*accumulate((len(word) + 1 for word in text), initial=0)][begin] if placed else None
    around = (len(head), len(head + body)) if head else None
    return Chunk(head + body, id, document=document, start=start, body=around)


@st.composite
def additions(draw: st.DrawFn) -> list[Chunk]:
    """Draw the chunks of one call, some by their places, some without."""
    return [draw(chunks(placed=draw(st.booleans()))) for _ in range(draw(st.integers(1, 4)))]


class DocumentMachine(stateful.RuleBasedStateMachine):
    """Two engines, each with a store of its own on one folder, as two processes would have."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.engines: list[BlendEngine] = []

    @stateful.initialize(
        companions=st.sampled_from(["own", "similar"]),
        separator=st.sampled_from(["", "t3 t4"]),
        options=st.fixed_dictionaries(
            {
                "ram_bytes": st.sampled_from([0, 4_000, 10**7]),
                "disk_bytes": st.sampled_from([None, None, 12_000]),
            }
        ),
    )
    def make(self, companions: str, separator: str, options: dict[str, Any]) -> None:
        given = {"companions": companions, "separator": separator}
        reuse = {"encode_batch_tokens": 32, "recompute_ratio": 0.0, "self_check": False}
        self.settings = engine_settings(**given, **reuse)
        self.options = options
        self.engines = [self.open(False), self.open(True)]
        self.library = Library(separator_of(self.engines[0]))

    def folder_of(self, second: bool) -> Path:
        return self.folder

    def store_of(self, second: bool) -> KVStore:
        return open_store(self.folder_of(second), **self.options)

    def open(self, second: bool) -> BlendEngine:
        store = self.store_of(second)
        return BlendEngine(small_model(), tiny_tokenizer(), **self.settings, store=store)

    def end(self, engine: BlendEngine) -> None:
        engine.close()
        store_of(engine).close()

    def readings(self) -> dict[str, Reading]:
        return self.library.readings()

    def with_more(self, given: list[Chunk], whole: bool = False) -> Library:
        """Return what the library is to be once these are added; their documents have nothing else then, if they are `whole`."""
        future = Library(self.library.separator)
        future.pieces = {document: list(pieces) for document, pieces in self.library.pieces.items()}
        future.alone = dict(self.library.alone)
        if whole:
            future.remove(future.others(given))
        future.add(given)
        return future

    def change(self, call: Callable[[], object]) -> None:
        call()
        for engine in self.engines:
            engine.flush()

    # What is asked of an engine.

    @stateful.rule(second=st.booleans(), given=additions(), background=st.booleans(), whole=st.booleans())
    def add(self, second: bool, given: list[Chunk], background: bool, whole: bool) -> None:
        self.library = self.with_more(given, whole)
        self.change(lambda: self.engines[second].add(given, background=background, whole=whole))

    @stateful.rule(second=st.booleans(), first=additions(), then=SOME_IDS)
    def add_while_others_delete(self, second: bool, first: list[Chunk], then: list[str]) -> None:
        """Delete with one engine what the other encodes in the background."""
        self.library = self.with_more(first)
        self.engines[second].add(first, background=True)
        self.delete(not second, then)
        self.change(self.engines[second].flush)

    @stateful.rule(second=st.booleans(), ids=SOME_IDS)
    def delete(self, second: bool, ids: list[str]) -> None:
        known = set(self.readings()).intersection(ids)
        assert self.engines[second].delete(ids) == len(known)
        self.library.remove(ids)

    @stateful.rule(second=st.booleans(), document=st.sampled_from(sorted(TEXTS)))
    def delete_document(self, second: bool, document: str) -> None:
        ids = [piece.id for piece in self.library.order(document)]
        assert self.engines[second].delete_document(document) == len(ids)
        self.library.remove(ids)

    @stateful.rule(second=st.booleans(), ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=4))
    def ask(self, second: bool, ids: list[str]) -> None:
        known = [id for id in ids if id in self.readings()]
        engine = self.engines[second]
        self.change(lambda: engine.prefill(BlendPrompt("t5 t6", known, "t7 t8")))

    @stateful.rule(second=st.booleans(), met=st.sampled_from(sorted(MET)), ids=SOME_IDS)
    def meet(self, second: bool, met: str, ids: list[str]) -> None:
        """Ask with a text that was never added, which is not named for that."""
        known = [id for id in ids if id in self.readings()]
        engine = self.engines[second]
        for _ in range(2):
            self.change(lambda: engine.prefill(BlendPrompt("t5 t6", [Chunk(MET[met], met), *known], "t7 t8")))

    @stateful.rule(second=st.booleans(), ids=SOME_IDS)
    def prefetch(self, second: bool, ids: list[str]) -> None:
        known = [id for id in ids if id in self.readings()]
        self.engines[second].prefetch(known).wait()

    @stateful.rule(second=st.booleans(), id=st.sampled_from(IDS))
    def evict(self, second: bool, id: str) -> None:
        evict(self.engines[second], id)

    @stateful.rule(second=st.booleans())
    def reopen(self, second: bool) -> None:
        self.end(self.engines[second])
        self.engines[second] = self.open(second)

    # What must be true then.

    @stateful.precondition(lambda self: self.engines)
    @stateful.invariant()
    def nothing_is_stale(self) -> None:
        readings = self.readings()
        for engine in self.engines:
            assert set(engine.ids()) == set(readings)
            for document in TEXTS:
                assert engine.document(document) == [piece.id for piece in self.library.order(document)]
            ids = sorted(readings)
            assert documents_of(engine, ids) == [
                next((name for name in TEXTS if id in map(str, engine.document(name))), None) for id in ids
            ]
            keys: dict[tuple[Ids, Ids], str] = {}
            records = [record for record in engine.records(ids) if record is not None]
            assert [record.id for record in records] == ids
            for record in records:
                assert record.token_ids + record.separator == readings[record.id].ids
                later = later_of(engine, record, readings)
                for key, reading in zip(record.keys, (readings[record.id], later), strict=False):
                    assert reading is not None
                    name = reading.context, reading.ids
                    # Equal text behind equal text is one entry, and nothing else is.
                    assert keys.setdefault(name, key) == key
                    assert rows().is_right(engine, key, reading), record.id
            assert len(set(keys.values())) == len(keys)
            stats = store_of(engine).stats()
            assert stats.nodes == len(readings)
            assert stats.entries <= len(keys)

    def teardown(self) -> None:
        try:
            if self.engines:
                self.engines[0].delete(self.engines[0].ids())
                for second, engine in enumerate(self.engines):
                    assert engine.ids() == []
                    # What was met in its prompts alone goes with its ids, and with what it has seen.
                    assert engine.delete([*IDS, *MET]) == 0
                    stats = store_of(engine).stats()
                    assert (stats.nodes, stats.entries, stats.disk_bytes) == (0, 0, 0)
                    assert stats.ram_bytes == 0
                    folder = self.folder_of(bool(second))
                    assert list((folder / "kv").glob("*/*")) == []
                    assert check_store(folder).problems == []
        finally:
            for engine in self.engines:
                self.end(engine)
            shutil.rmtree(self.folder)


def run_machine(examples: int, steps: int, part: int = 0, machine: Any = DocumentMachine, **options: Any) -> None:
    how = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), **options)
    stateful.run_state_machine_as_test(seed(part)(machine), settings=how)


def test_sampled() -> None:
    run_machine(8, 15)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_whole(part: int) -> None:
    run_machine(40, 40, part, database=None)
