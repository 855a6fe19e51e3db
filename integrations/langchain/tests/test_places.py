"""Which document each text of a vector store is a piece of, and where: through splitters, loaders, retrievers and `index`."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_community.document_loaders import CSVLoader
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.errors import ConfigError
from integrations.langchain.tests.asking import chunk_ids
from langchain_cacheblend import BlendLLM, BlendVectorStore, warm
from langchain_cacheblend.inventory import Inventory
from tests.engines import documents_of

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


def split(*documents: Document, start: bool = True, overlap: int = 24) -> list[Document]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=overlap, add_start_index=start)
    return splitter.split_documents(documents)


def of(text: str, source: object = "mara.txt", **metadata: Any) -> Document:
    return Document(text, metadata={"source": source, **metadata})


def read(store: BlendVectorStore, ids: list[str]) -> list[list[str]]:
    """The documents that these chunks are pieces of, each as the texts of all its pieces in the order in which it is read."""
    engine = store.engine
    texts = {document.id: document.page_content for document in Inventory(store.inner).documents(engine.ids())}
    names = dict.fromkeys(documents_of(engine, ids))
    return [[texts[id] for id in engine.document(name)] for name in names if name is not None]


def texts_of(pieces: list[Document]) -> list[str]:
    return [piece.page_content for piece in pieces]


def test_pieces_are_read_by_their_start_in_whatever_order_they_come(store: BlendVectorStore) -> None:
    pieces = split(of(TEXT), of(OTHER, "tove.txt"), overlap=0)
    half = len(split(of(TEXT), overlap=0))
    shuffled = [*pieces[1::2], *pieces[::2][::-1]]
    ids = store.add_documents(shuffled)
    documents = [texts_of(pieces[:half]), texts_of(pieces[half:])]
    assert sorted(read(store, ids)) == sorted(documents)
    for document, name in zip(documents, ("mara.txt", "tove.txt"), strict=True):
        [place] = {place for place in documents_of(store.engine, ids) if place and name in place}
        records = store.engine.records(store.engine.document(place))
        for before, record in zip(document, records[1:], strict=False):
            assert record is not None and record.later is not None
            assert store.engine.tokenizer.decode(record.later.behind).rstrip().endswith(before)
    # A text that is put in the place of another is read there.
    ids = store.engine.document(place)
    changed = [Document("New words.", metadata=pieces[half + 1].metadata)]
    store.add_documents(changed, ids=ids[1:2])
    assert store.engine.document(place) == ids
    # What was filled behind our back is the same once it is warmed.
    store.engine.delete(store.engine.ids())
    warm(store)
    assert store.engine.document(place) == ids


def test_without_a_start_a_piece_has_its_document_only(store: BlendVectorStore) -> None:
    pieces = split(of(TEXT), of(OTHER, "tove.txt", start_index=-1), start=False)
    ids = store.add_documents(pieces)
    assert sorted(map(sorted, read(store, ids))) == sorted(
        sorted(texts_of(split(of(text), start=False))) for text in (TEXT, OTHER)
    )


def test_what_loaders_make_of_one_source_is_apart(store: BlendVectorStore, tmp_path: Path) -> None:
    (tmp_path / "goats.csv").write_text("name,town\nPim,Oslo\nPam,Bergen\nPom,Molde\n")
    rows = CSVLoader(str(tmp_path / "goats.csv")).load()
    pages = split(of(TEXT, page=0), of(OTHER, page=1))
    texts = [[row.page_content] for row in rows]
    texts += [texts_of(split(of(text))) for text in (TEXT, OTHER)]
    assert read(store, store.add_documents([*rows, *pages])) == texts
    assert set(documents_of(store.engine, store.add_texts([TEXT, OTHER]))) == {None}


@pytest.mark.parametrize("source", [None, "", " \n", float("nan"), "nan", [], {}, False])
def test_a_source_that_says_nothing_is_no_document(engine: BlendEngine, embedding: Embeddings, source: object) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    ids = store.add_documents([of(f"Ticket {n}.", source, page=1, start_index=0) for n in range(2)])
    assert documents_of(store.engine, ids) == [None, None]


def test_a_boundary_divides_documents(inner: VectorStore, engine: BlendEngine) -> None:
    store = BlendVectorStore(inner, engine=engine, boundary=["team"])
    pieces = split(of(TEXT))
    for place, piece in enumerate(pieces):
        if place:
            piece.metadata["team"] = "ab"[place % 2]
    ids = store.add_documents(pieces)
    assert read(store, ids) == [texts_of(pieces[:1]), texts_of(pieces[1::2]), texts_of(pieces[2::2])]
    with pytest.raises(ConfigError):
        BlendVectorStore(inner, engine=engine, boundary="team")


@pytest.mark.parametrize("companions", ["neutral", "similar"])
def test_companions(embedding: Embeddings, tiny: LlamaForCausalLM, tokenizer: Any, companions: str) -> None:
    with BlendEngine(tiny, tokenizer, **engine_settings(SETTINGS, companions=companions)) as engine:
        pieces = split(of(TEXT))
        store = BlendVectorStore.from_documents(pieces, embedding, inner=InMemoryVectorStore, engine=engine)
        assert None not in documents_of(engine, engine.ids())
        if companions == "similar":
            with pytest.raises(ConfigError):
                BlendVectorStore(store.inner, engine=engine, boundary=["team"])


def test_stores_are_told_apart_by_their_collection_or_name(
    embedding: Embeddings, engine: BlendEngine, tmp_path: Path
) -> None:
    pieces = split(of(TEXT))
    client = chromadb.PersistentClient(str(tmp_path))
    inners = [Chroma(name, embedding, client=client) for name in ("notes", "tasks", "notes")]
    stores = [BlendVectorStore(inner, engine=engine) for inner in inners]
    stores += [BlendVectorStore(InMemoryVectorStore(embedding), engine=engine, name=name) for name in ("a", "b", "a")]
    names = [documents_of(engine, store.add_documents(pieces))[0] for store in stores]
    assert (names[0], names[3]) == (names[2], names[5])
    assert len(set(names)) == 4


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
        (document,) = set(documents_of(engine, [str(child) for child in children]))
        assert engine.document(str(document)) == children
        assert engine.generate(prompt, max_new_tokens=4).report.hits == len(children) > 1


@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_index_leaves_no_trace(store: BlendVectorStore, tokenizer: Any, cleanup: Any, asynchronous: bool) -> None:
    engine, records = store.engine, InMemoryRecordManager("test")

    records.create_schema()

    async def run(**texts: str) -> None:
        pieces = split(*(of(text, source) for source, text in texts.items()))
        options: dict[str, Any] = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        if asynchronous:
            await aindex(pieces, records, store, batch_size=2, **options)
        else:
            index(pieces, records, store, batch_size=2, **options)

    await run(one=TEXT, two=OTHER)
    before = set(engine.ids())
    await run(one=TEXT.replace("Oslo and moved north", "Rome and stayed").replace("a cat", "no cat"))
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
    assert engine.store.stats().entries == len({key for record in known for key in record.keys})


def test_a_filter_is_warned_of_once(inner: VectorStore, engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    def search(given: Any) -> int:
        caplog.clear()
        store.similarity_search("goat", filter=given)
        return sum("filters by" in record.getMessage() for record in caplog.records)

    store = BlendVectorStore(inner, engine=engine, boundary=["team"])
    store.add_documents(split(of(TEXT, team="a", reader="x", year=1), of(OTHER, team="b", reader="y", year=2)))
    if isinstance(inner, InMemoryVectorStore):
        filters = [lambda document: True] * 2
        wanted = [1, 0]
    else:
        filters = [{"team": "a"}, {"$and": [{"team": "a"}, {"source": "mara.txt"}]}, *[{"reader": "x"}] * 2]
        filters += [{"$or": [{"reader": "x"}, {"year": {"$gt": 1}}]}]
        wanted = [0, 0, 1, 0, 1]
    assert [search(each) for each in filters] == wanted
