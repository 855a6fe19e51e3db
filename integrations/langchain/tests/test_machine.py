"""No KV is stale: any sequence of calls on a LangChain store, against a library that works everything out anew."""

import shutil
import tempfile
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import check_store
from integrations.langchain.tests.conftest import LetterCounts
from langchain_cacheblend import BlendVectorStore, warm
from tests.core.documents.naive import Library, Rows, later_of, small_model
from tests.core.documents.test_machine import run_machine
from tests.engines import documents_of
from tests.families import tiny_tokenizer, words

SOURCES = {"one.txt": words(40, 1).split(), "two.txt": words(40, 1).split(), "three.txt": words(40, 3).split()}
IDS = [f"n{number}" for number in range(6)]
ROWS = Rows(small_model())

# Of each id: the source, the first word and how many; None for a text of no source.
PIECES = st.fixed_dictionaries(
    {},
    optional={
        id: st.tuples(st.sampled_from([*SOURCES, None]), st.integers(0, 20), st.integers(1, 9), st.booleans())
        for id in IDS
    },
)
SOME_IDS = st.lists(st.sampled_from(IDS), max_size=3, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """A store in memory, wrapped, and its engine on a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.engine: BlendEngine | None = None

    @initialize(separator=st.sampled_from(["", "t3 t4"]), background=st.booleans())
    def make(self, separator: str, background: bool) -> None:
        reuse = {"recompute_ratio": 0.0, "self_check": False, "ram_bytes": 20000}
        self.settings = engine_settings(separator=separator, **reuse)
        self.inner = InMemoryVectorStore(LetterCounts())
        self.background = background
        self.open()
        assert self.engine is not None
        self.library = Library(self.engine._assembler.separator)
        # The source of each chunk, as it was last added.
        self.sources: dict[str | None, str | None] = {}

    def open(self) -> None:
        self.engine = BlendEngine(small_model(), tiny_tokenizer(), store=self.folder, **self.settings)
        self.store = BlendVectorStore(self.inner, engine=self.engine, background=self.background, name="machine")

    @rule(given=PIECES)
    def add(self, given: dict[str, tuple[str | None, int, int, bool]]) -> None:
        documents, chunks = [], []
        last: dict[str, int] = {}
        # No two pieces of a source begin at one place.
        for id, (source, first, count, other) in sorted(given.items(), key=lambda each: each[1][1]):
            text = SOURCES[source or "one.txt"]
            start = [*accumulate((len(word) + 1 for word in text), initial=0)][first]
            body = words(count, 70 + count) if other else " ".join(text[first : first + count])
            if source is None:
                documents.append(Document(body, id=id))
                chunks.append(Chunk(body, id))
            elif start > last.get(source, -1):
                last[source] = start
                documents.append(Document(body, id=id, metadata={"source": source, "start_index": start}))
                chunks.append(Chunk(body, id, document=source, start=start))
        if documents:
            self.store.add_documents(documents)
            self.sync({chunk.document for chunk in chunks if chunk.document}, {chunk.id for chunk in chunks})
            self.library.add(chunks)
            self.sources |= {chunk.id: chunk.document for chunk in chunks}

    def sync(self, sources: Collection[str | None], spared: Collection[str | None] = ()) -> None:
        """Take out of the library what was deleted of some sources behind the store's back."""
        lost = set(self.library.readings()) - set(self.inner.store) - set(spared)
        self.library.remove([id for id in lost if self.sources[id] in sources])

    @rule(ids=SOME_IDS)
    def delete(self, ids: list[str]) -> None:
        self.store.delete(ids)
        self.library.remove(ids)

    @rule(ids=SOME_IDS)
    def delete_behind_its_back(self, ids: list[str]) -> None:
        self.inner.delete(ids)

    @rule()
    def warm(self) -> None:
        warm(self.store)
        self.sync({self.sources[id] for id in self.inner.store} - {None})

    @rule(ids=SOME_IDS)
    def ask(self, ids: list[str]) -> None:
        assert self.engine is not None
        known = [id for id in ids if id in self.library.readings()]
        self.engine.prefill(BlendPrompt("t5 t6", known, "t7 t8"))

    @rule(id=st.sampled_from(IDS), place=st.sampled_from([0, -1]))
    def evict(self, id: str, place: int) -> None:
        assert self.engine is not None
        [record] = self.engine.records([id])
        if record is not None:
            self.engine._store.discard(record.keys[place])

    @rule()
    def reopen(self) -> None:
        assert self.engine is not None
        self.engine.close()
        self.open()

    @precondition(lambda self: self.engine is not None)
    @invariant()
    def nothing_is_stale(self) -> None:
        assert self.engine is not None
        self.engine.flush()
        readings = self.library.readings()
        assert set(self.engine.ids()) == set(readings)
        for source in SOURCES:
            order = [piece.id for piece in self.library.order(source)]
            places = set(documents_of(self.engine, order))
            assert len(places) == bool(order)
            for place in places:
                assert place is not None
                assert self.engine.document(place) == order
        assert set(documents_of(self.engine, [*self.library.alone])) <= {None}
        records = {record.id: record for record in self.engine.records(list(readings)) if record is not None}
        for id, reading in readings.items():
            record = records[id]
            assert record.token_ids + record.separator == reading.ids
            assert ROWS.is_right(self.engine, record.key, reading), id
            later = later_of(self.engine, record, readings)
            if record.later is None or later is None:
                continue
            assert ROWS.is_right(self.engine, record.later.key, later), id
            # Of no other document.
            seen = [other for other, _ in record.later.seen]
            assert set(documents_of(self.engine, seen)) <= set(documents_of(self.engine, [id]))
            assert not seen or documents_of(self.engine, [id]) != [None]
        assert self.engine._store.stats().entries <= len({key for each in records.values() for key in each.keys})

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.delete(self.engine.ids())
            assert self.engine._store.stats().entries == 0
            self.engine.close()
            assert check_store(self.folder).problems == []
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("part", "examples", "steps"),
    [(0, 6, 12), *(pytest.param(part, 40, 40, marks=pytest.mark.full) for part in range(1, 11))],
)
def test_nothing_is_stale(part: int, examples: int, steps: int) -> None:
    run_machine(examples, steps, part, StoreMachine, database=None)
