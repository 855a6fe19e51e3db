"""Which document each text of a vector store is a piece of, and where: through splitters, loaders, retrievers and `index`."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_community.document_loaders import CSVLoader, TextLoader
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError
from integrations.langchain.tests.asking import chunk_ids
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend, warm
from langchain_cacheblend.inventory import Inventory

SETTINGS = engine_settings(self_check=False, separator="\n\n")
TEXT = (
    "Mara Lind was born in Oslo and moved north when she was nine. She works at the harbour as a rope maker, and has done so for "
    "years. Her house stands behind the old light tower. A striped goat called Pim lives there too, and a cat that nobody named."
)
OTHER = (
    "Tove Brandt keeps the archive of the town. He reads letters that were never sent, and answers some of them at night. Nobody "
    "knows where the replies go. His sister has asked him twice to stop, and he has promised it twice as well."
)


@pytest.fixture
def engine(tiny: LlamaForCausalLM, tokenizer: Any) -> Iterator[BlendEngine]:
    with BlendEngine(tiny, tokenizer, **SETTINGS) as engine:
        yield engine


@pytest.fixture(params=["chroma", "in_memory"])
def inner(request: pytest.FixtureRequest, embedding: Embeddings) -> Iterator[VectorStore]:
    if request.param == "in_memory":
        yield InMemoryVectorStore(embedding)
        return
    chroma = Chroma(f"test-{uuid.uuid4().hex}", embedding, client=chromadb.EphemeralClient())
    yield chroma
    chroma.delete_collection()


@pytest.fixture
def store(inner: VectorStore, engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(inner, engine=engine)


def split(*documents: Document, start: bool = True, size: int = 60, overlap: int = 24) -> list[Document]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap, add_start_index=start)
    return splitter.split_documents(documents)


def of(text: str, source: str = "mara.txt", **metadata: Any) -> Document:
    return Document(text, metadata={"source": source, **metadata})


def read(store: BlendVectorStore, ids: list[str]) -> list[list[str]]:
    """The documents that these chunks are pieces of, each as the texts of all its pieces in the order in which it is read."""
    engine = store.engine
    texts = {document.id: document.page_content for document in Inventory(store.inner).documents(engine.ids())}
    names = dict.fromkeys(engine.places(ids))
    return [[texts[id] for id in engine.document(name)] for name in names if name is not None]


def texts_of(pieces: list[Document]) -> list[str]:
    return [piece.page_content for piece in pieces]


@pytest.fixture
def added(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str | None, Chunk]:
    """The chunks that the engine is given from now on."""
    found: dict[str | None, Chunk] = {}
    add = engine.add

    def noting(chunks: Any, **options: Any) -> Any:
        chunks = list(chunks)
        found.update({chunk.id: chunk for chunk in chunks})
        return add(chunks, **options)

    monkeypatch.setattr(engine, "add", noting)
    return found


# Texts of one source


def test_pieces_with_a_start_index_stand_there(store: BlendVectorStore, added: dict[str, Chunk]) -> None:
    pieces = split(of(TEXT))
    ids = store.add_documents(pieces)
    assert len(ids) > 4
    assert [added[id].start for id in ids] == [TEXT.find(piece.page_content) for piece in pieces]
    assert len({added[id].document for id in ids}) == 1
    assert read(store, ids) == [texts_of(pieces)]


def test_pieces_without_follow_each_other(store: BlendVectorStore, added: dict[str, Chunk]) -> None:
    pieces = split(of(TEXT), of(OTHER, "tove.txt"), start=False)
    # Pieces of two sources by turns.
    half = len(split(of(TEXT)))
    mixed = [piece for pair in zip(pieces[:half], pieces[half:], strict=False) for piece in pair]
    ids = store.add_documents(mixed)
    assert all(added[id].start is None for id in ids)
    one, two = read(store, ids)
    assert (one, two) == (texts_of(mixed[::2]), texts_of(mixed[1::2]))


def test_a_piece_is_read_behind_what_precedes_it(store: BlendVectorStore) -> None:
    pieces = split(of(TEXT), of(OTHER, "tove.txt"), overlap=0)
    ids = store.add_documents(pieces)
    for before, after, id in zip(pieces, pieces[1:], ids[1:], strict=False):
        [record] = store.engine.records([id])
        assert record is not None and record.later is not None
        behind = store.engine.tokenizer.decode(record.later.behind).rstrip()
        assert behind.endswith(before.page_content) == (before.metadata["source"] == after.metadata["source"])


def test_a_falling_or_repeated_start_begins_another_text_of_the_source(store: BlendVectorStore) -> None:
    pieces = split(of(TEXT), of(OTHER), of("A single line."), of("Another."))
    ids = store.add_documents(pieces)
    half = len(split(of(TEXT)))
    assert read(store, ids) == [texts_of(pieces[:half]), texts_of(pieces[half:-2]), ["A single line."], ["Another."]]
    # Their names are the same when they are added again, under their ids or new ones, by this object or another.
    names = store.engine.places(ids)
    assert store.engine.places(store.add_documents(pieces, ids=ids)) == names
    assert store.engine.places(store.add_documents(pieces)) == names
    again = BlendVectorStore(store.inner, engine=store.engine)
    assert store.engine.places(again.add_documents(pieces)) == names


@pytest.mark.parametrize(("texts", "size"), [(1, 1), (1, 3), (2, 3), (2, 100)])
def test_pieces_that_index_adds_in_batches_are_one_document(store: BlendVectorStore, texts: int, size: int) -> None:
    documents = [[of(text, source) for text in (TEXT, OTHER)[:texts]] for source in ("one", "two")]
    pieces = split(*documents[0], *documents[1])
    # A batch ends within each of the texts, and not between two of one source, which could not be seen.
    assert size > len(pieces) or len(split(documents[0][0])) % 3
    index(pieces, InMemoryRecordManager("test"), store, batch_size=size, cleanup=None, key_encoder="sha256")
    expected = [texts_of(split(document)) for source in documents for document in source]
    assert sorted(read(store, store.engine.ids())) == sorted(expected)


def test_a_piece_not_found_stands_in_order(store: BlendVectorStore, tokenizer: Any, added: dict[str, Chunk]) -> None:
    # LangChain takes the overlap for characters, whatever it was counted in, and looks for a piece behind its beginning.
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=24,
        chunk_overlap=8,
        add_start_index=True,
        length_function=lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    pieces = splitter.split_documents([of(TEXT), of(OTHER, "tove.txt")])
    assert any(piece.metadata["start_index"] == -1 for piece in pieces)
    ids = store.add_documents(pieces)
    for id, piece in zip(ids, pieces, strict=True):
        text = TEXT if piece.metadata["source"] == "mara.txt" else OTHER
        assert added[id].start == text.find(piece.page_content)


def test_what_has_no_source_or_is_a_row_of_a_table_stands_alone(store: BlendVectorStore, tmp_path: Path) -> None:
    (tmp_path / "goats.csv").write_text("name,town\nPim,Oslo\nPam,Bergen\nPom,Molde\n")
    rows = CSVLoader(str(tmp_path / "goats.csv")).load()
    ids = store.add_documents([*rows, *split(Document(TEXT)), of("Alone.", cacheblend_context="none")])
    ids += store.add_texts([TEXT, OTHER])
    assert store.engine.places(ids) == [None] * len(ids)
    (tmp_path / "mara.txt").write_text(TEXT)
    pieces = split(*TextLoader(str(tmp_path / "mara.txt")).load())
    assert read(store, store.add_documents(pieces)) == [texts_of(pieces)]


def test_pages_are_documents_and_other_keys_can_be_named(inner: VectorStore, engine: BlendEngine) -> None:
    pieces = split(of(TEXT, page=0), of(OTHER, page=1), of("No page."))
    store = BlendVectorStore(inner, engine=engine)
    assert len(read(store, store.add_documents(pieces))) == 3
    engine.delete(engine.ids())
    store = BlendVectorStore(inner, engine=engine, document_keys=["book", "chapter"])
    ids = store.add_documents(split(of(TEXT, book=1, chapter=1), of(OTHER, book=1), of("Of none.")))
    *rest, last = engine.places(ids)
    assert last is None and None not in rest and len(set(rest)) == 2


def test_a_boundary_divides_documents(inner: VectorStore, engine: BlendEngine) -> None:
    store = BlendVectorStore(inner, engine=engine, boundary=["team"])
    pieces = split(of(TEXT))
    for place, piece in enumerate(pieces):
        if place:
            piece.metadata["team"] = "ab"[place % 2]
    ids = store.add_documents(pieces)
    assert read(store, ids) == [texts_of(pieces[:1]), texts_of(pieces[1::2]), texts_of(pieces[2::2])]


def test_with_neutral_companions_all_alone(embedding: Embeddings, tiny: LlamaForCausalLM, tokenizer: Any) -> None:
    with BlendEngine(tiny, tokenizer, **engine_settings(SETTINGS, companions="neutral")) as engine:
        pieces = split(of(TEXT))
        store = BlendVectorStore.from_documents(pieces, embedding, inner=InMemoryVectorStore, engine=engine)
        assert engine.places(engine.ids()) == [None] * len(pieces)
        store.similarity_search("goat", filter=lambda document: True)


# Other doors


def test_stores_over_one_engine_share_no_documents(embedding: Embeddings, engine: BlendEngine, tmp_path: Path) -> None:
    pieces = split(of(TEXT))
    first, second = InMemoryVectorStore(embedding), InMemoryVectorStore(embedding)
    stores = [BlendVectorStore(inner, engine=engine) for inner in (first, second, first)]
    stores += [BlendVectorStore(InMemoryVectorStore(embedding), engine=engine, name=name) for name in ("a", "a", "b")]
    names = [engine.places(store.add_documents(pieces))[0] for store in stores]
    assert names[0] == names[2]
    assert names[3] == names[4]
    assert len(set(names)) == 4
    # A collection is the same one when it is opened again.
    found = []
    for half in (pieces[::2], pieces[1::2]):
        chroma = Chroma("notes", embedding, client=chromadb.PersistentClient(str(tmp_path)))
        store = BlendVectorStore(chroma, engine=engine)
        found = read(store, store.add_documents(half))
    assert found == [texts_of(pieces)]


def test_what_another_store_keeps_is_no_piece_of_a_document_it_left(embedding: Embeddings, engine: BlendEngine) -> None:
    pieces = split(of(TEXT))
    ids = [f"piece {place}" for place in range(len(pieces))]
    other = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    other.add_texts([pieces[1].page_content], ids=ids[1:2])
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_documents(pieces, ids=ids)
    store.delete(ids[1:2])
    assert engine.contains(ids[1])
    assert engine.places(ids[1:2]) == [None]
    assert engine.document(engine.places(ids)[0] or "") == [ids[0], *ids[2:]]


def test_a_piece_that_is_updated_keeps_its_place(embedding: Embeddings, engine: BlendEngine) -> None:
    for start in (True, False):
        store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
        pieces = split(of(TEXT), start=start)
        first = store.add_documents(pieces[:3])
        ids = [*first, *store.add_documents(pieces[3:])]
        for places in ([1], [3], [4, 1], [0, 3]):
            for place in places:
                pieces[place].page_content = f"New words: {pieces[place].page_content}"
            store.add_documents([pieces[place] for place in places], ids=[ids[place] for place in places])
            assert engine.document(engine.places(ids)[0] or "") == ids


def test_warming_reads_a_source_in_order_whatever_came_first(store: BlendVectorStore) -> None:
    pieces = split(of(TEXT))
    ids = store.inner.add_documents([*pieces[1:4], pieces[0], *pieces[4:]])
    warm(store)
    assert read(store, ids) == [texts_of(pieces)]
    assert warm(store).encoded == 0
    # Texts of one source are told apart by the order in which they came.
    several = split(of(TEXT, "two"), of(OTHER, "two"))
    more = store.inner.add_documents(several)
    warm(store)
    half = len(split(of(TEXT)))
    assert read(store, more) == [texts_of(several[:half]), texts_of(several[half:])]


@pytest.mark.parametrize("parents", ["whole", "split"])
def test_parents_of_retrieved_pieces_are_served_from_these(store: BlendVectorStore, parents: str) -> None:
    retriever = ParentDocumentRetriever(
        vectorstore=store,
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0, add_start_index=True),
        parent_splitter=None if parents == "whole" else RecursiveCharacterTextSplitter(chunk_size=150, chunk_overlap=0),
        search_kwargs={"k": 2},
    )
    retriever.add_documents([of(TEXT), of(OTHER, "tove.txt")])
    engine = store.engine
    llm = BlendLLM(engine=engine, max_tokens=4)
    for question in ("Where does the goat live?", "Who keeps the archive?"):
        (parent, *_) = retriever.invoke(question)
        prompt = llm.blend_prompt(f"Read this:\n\n{parent.page_content}\n\n{question}")
        children = chunk_ids(prompt)
        # A parent's children are pieces of one document, and stand in its text one behind the other.
        (document,) = set(engine.places([str(child) for child in children]))
        assert engine.document(str(document)) == children
        assert engine.generate(prompt, max_new_tokens=4).report.hits == len(children) > 1
    store.delete(engine.ids())
    assert chunk_ids(llm.blend_prompt(f"{TEXT}\n\n{OTHER}")) == []


# Keeping in step


@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
@pytest.mark.parametrize("start", [True, False], ids=["start_index", "in_order"])
def test_index_leaves_no_trace(store: BlendVectorStore, tokenizer: Any, cleanup: Any, start: bool) -> None:
    engine, records = store.engine, InMemoryRecordManager("test")

    def run(**texts: str) -> None:
        pieces = split(*(of(text, source) for source, text in texts.items()), start=start)
        options: dict[str, Any] = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        index(pieces, records, store, batch_size=2, **options)

    run(one=TEXT, two=OTHER)
    before = set(engine.ids())
    changed = TEXT.replace("Oslo and moved north", "Rome and stayed").replace("a cat", "no cat")
    run(one=changed)
    live = {document.id: document for document in store.get_by_ids(engine.ids())}
    assert set(engine.ids()) == set(live)
    assert (before <= set(live)) == (cleanup is None)
    assert any(document.metadata["source"] == "two" for document in live.values()) == (cleanup != "full")
    # No KV has seen a text that is no more.
    engine.generate(BlendPrompt("Read:\n", [*live, *live], "\nWho?"), max_new_tokens=1)
    engine.flush()
    known = [record for record in engine.records(list(live)) if record is not None]
    seen = [record.later for record in known if record.later is not None]
    assert len(seen) == len(live) and {id for later in seen for id, _ in later.seen} <= set(live)
    behind = "\n".join(tokenizer.decode(later.behind) for later in seen)
    assert ("moved north" in behind) == (cleanup is None)
    assert engine._store.stats().entries == len({key for record in known for key in record.keys})


# Filters


def test_a_filter_is_warned_of_once(inner: VectorStore, engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "filters by" in record.getMessage()]
        caplog.clear()
        return found

    store = BlendVectorStore(inner, engine=engine, boundary=["team"])
    store.add_documents(split(of(TEXT, team="a", reader="x", year=1), of(OTHER, team="b", reader="y", year=2)))
    if isinstance(inner, InMemoryVectorStore):
        for _ in range(2):
            store.similarity_search("goat", filter=lambda document: document.metadata["reader"] == "x")
        assert [message[: message.index(",")] for message in warnings()] == ["a search filters by a function"]
        return
    for given in ({"team": "a"}, {"source": "mara.txt"}, {"$and": [{"team": "a"}, {"source": "mara.txt"}]}):
        store.similarity_search("goat", filter=given)
    assert warnings() == []
    retriever = store.as_retriever(search_kwargs={"filter": {"reader": "x"}, "k": 2})
    assert retriever.invoke("goat") and retriever.invoke("archive")
    (said,) = warnings()
    assert "filters by reader" in said and "boundary=[...]" in said and 'companions="neutral"' in said
    store.similarity_search_with_score("goat", 2, {"$or": [{"reader": "x"}, {"year": {"$gt": 1}}]})
    (said,) = warnings()
    assert "filters by year" in said


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"boundary": "team"}, r"boundary='team' must be a list"),
        ({"document_keys": [1]}, r"document_keys=\[1\] must be a list"),
    ],
)
def test_bad_options_refused(options: dict[str, Any], match: str, embedding: Embeddings, engine: BlendEngine) -> None:
    with pytest.raises(ConfigError, match=match):
        BlendVectorStore(InMemoryVectorStore(embedding), engine=engine, **options)


# Prompts


def test_of_several_entries_that_of_the_fullest_document_serves(embedding: Embeddings, engine: BlendEngine) -> None:
    common = "This line stands in every document of the house."
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    texts = {source: [f"The first words of {source}.", common, f"The last words of {source}."] for source in "abc"}
    for source, lines in texts.items():
        store.add_documents([of(line, source) for line in lines], ids=[f"{source}{place}" for place in range(3)])
    llm = BlendLLM(engine=engine)

    def found(*lines: str) -> list[str | None]:
        return chunk_ids(llm.blend_prompt("\n".join(lines)))

    assert found(texts["b"][0], common, texts["b"][2], texts["a"][0]) == ["b0", "b1", "b2", "a0"]
    assert found(common, texts["c"][2]) == ["c1", "c2"]
    # Where no document has more than the others it is one of none, under the name of such a chunk if there is one.
    assert found(texts["a"][0], common, texts["b"][0]) == ["a0", None, "b0"]
    assert found(common) == [None]
    report = engine.generate(llm.blend_prompt(f"Read: {common}\nWhat?"), max_new_tokens=2).report
    # A prompt's first chunk is the same in all documents.
    assert (report.hits, report.misses) == (1, 0)
    store.add_texts([common], ids=["alone"])
    assert found(texts["a"][0], common, texts["b"][0]) == ["a0", "alone", "b0"]
    assert found(texts["a"][0], common) == ["a0", "a1"]
    # Another name of the same KV is no entry of its own.
    store.add_texts([common], ids=["alone too"])
    assert found(texts["a"][0], common) == ["a0", "a1"]
    store.delete(["a1", "b1", "c1"])
    assert found(common) == ["alone"]


def test_an_engine_made_by_name_joins_chunks_as_chains_do() -> None:
    for config, separator in ((None, "\n\n"), (EngineConfig(strict=True), "\n\n"), ({"separator": "\n"}, "\n")):
        llm = ChatBlend(model="reference", engine_config=config)
        assert llm.engine.config.separator == separator
        llm.engine.close()


@pytest.mark.parametrize("source", [None, "", " \n", float("nan"), "nan", "None", [], {}, False])
def test_a_source_that_says_nothing_is_no_document(engine: BlendEngine, embedding: Embeddings, source: object) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    ids = store.add_documents([Document(f"Ticket {n}.", metadata={"source": source, "page": 1}) for n in range(2)])
    assert store.engine.places(ids) == [None, None]
    assert not store.engine.indexed([str(source)])


@pytest.mark.parametrize("at_once", [50, 1])
def test_many_short_texts_of_one_source_are_records(
    inner: VectorStore, engine: BlendEngine, at_once: int, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapped() -> BlendVectorStore:
        return BlendVectorStore(inner, engine=engine, name="tickets")

    store, ids = wrapped(), list[str]()
    for number in range(0, 50, at_once):
        ids += store.add_documents([of(f"Ticket {n}.", "news") for n in range(number, number + at_once)])
        # As after a restart.
        store = wrapped() if number == 25 else store
    alone = [place is None for place in engine.places(ids)]
    assert alone == [at_once > 1 or number >= 32 for number in range(50)]
    assert len(engine.indexed(["news"])) == 50 - sum(alone)
    warned = [record for record in caplog.records if "is treated as a category" in record.message]
    assert len(warned) == 1
    # What says where it begins, or is longer, is a document, however much of it there is.
    pieces = [Document(f"{n}.", metadata={"source": "numbers", "start_index": 3 * n}) for n in range(50)]
    pieces += [of(f"Line {n}. " * 60, "lines") for n in range(50)]
    assert None not in engine.places(store.add_documents(pieces))
