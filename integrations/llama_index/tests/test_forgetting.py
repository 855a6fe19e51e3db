"""What was made of a document goes with it."""

from pathlib import Path

import chromadb
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceWindowNodeParser, get_leaf_nodes
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag import BlendPrompt, Chunk
from integrations.llama_index.tests.conftest import FACTS, MakeLLM, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore


def some_nodes(embedding: WordEmbedding, document: str, names: str) -> list[TextNode]:
    return [
        TextNode(
            id_=f"{names}{number}",
            text=text,
            embedding=embedding.get_text_embedding(text),
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)},
        )
        for number, text in enumerate(FACTS)
    ]


def wrapped(llm: BlendLLM, folder: Path, name: str = "nodes") -> BlendVectorStore:
    client = chromadb.PersistentClient(str(folder / "chroma"))
    return BlendVectorStore(
        ChromaVectorStore(chroma_collection=client.get_or_create_collection(name)), engine=llm.engine
    )


def test_parents_of_prompts_go_with_it(llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding) -> None:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[96, 32], chunk_overlap=0)
    documents = [Document(text=" ".join(FACTS * 2), id_=f"d{number}") for number in range(2)]
    nodes = parser.get_nodes_from_documents(documents)
    storage = StorageContext.from_defaults(vector_store=BlendVectorStore(chroma, engine=llm.engine))
    storage.docstore.add_documents(nodes)
    leaves = get_leaf_nodes(nodes)
    index = VectorStoreIndex(leaves, storage_context=storage, embed_model=embedding)
    merging = AutoMergingRetriever(index.as_retriever(similarity_top_k=12), storage, simple_ratio_thresh=0.1)
    RetrieverQueryEngine(merging, BlendSynthesizer(llm)).query("Where was Mara born?")
    llm.engine.flush()
    parents = {node.node_id for node in nodes} - {leaf.node_id for leaf in leaves}
    assert parents & set(llm.engine.ids())
    for number in range(2):
        index.delete_ref_doc(f"d{number}")
    llm.engine.delete(llm.engine.heads())
    assert llm.engine.ids() == []
    figures = llm.engine.store.stats()
    assert (figures.nodes, figures.entries, figures.ram_bytes) == (0, 0, 0)


def test_windows_go_with_their_document(llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding) -> None:
    storage = StorageContext.from_defaults(vector_store=BlendVectorStore(chroma, engine=llm.engine))
    nodes = SentenceWindowNodeParser.from_defaults().get_nodes_from_documents([Document(text=" ".join(FACTS), id_="d")])
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=embedding)
    shown = MetadataReplacementPostProcessor(target_metadata_key="window")
    engine = RetrieverQueryEngine(index.as_retriever(), BlendSynthesizer(llm), node_postprocessors=[shown])
    before = llm.engine.store.stats().ram_bytes
    engine.query("Where was Mara born?")
    llm.engine.flush()
    llm.engine.delete(llm.engine.heads())
    assert llm.engine.store.stats().ram_bytes > before
    index.delete_ref_doc("d")
    assert llm.engine.store.stats().ram_bytes == 0


def test_what_another_collection_has_stays(llm: BlendLLM, tmp_path: Path, embedding: WordEmbedding) -> None:
    one, other = wrapped(llm, tmp_path, "one"), wrapped(llm, tmp_path, "other")
    one.add(some_nodes(embedding, "d", "a"))
    other.add(some_nodes(embedding, "d", "b"))
    met = Chunk("A parent that a prompt brought.", "parent", source="d")
    llm.engine.prefill(BlendPrompt("Hi.", [met], "Why?"))
    llm.engine.flush()
    one.delete("d")
    assert set(llm.engine.ids()) == {"parent", *(f"b{number}" for number in range(5))}
    other.delete("d")
    assert llm.engine.ids() == []


@pytest.mark.parametrize("when", ["asking", "adding"])
def test_deletions_elsewhere_seen(make_llm: MakeLLM, tmp_path: Path, embedding: WordEmbedding, when: str) -> None:
    llm = make_llm(store=tmp_path / "kv")
    store, other = wrapped(llm, tmp_path), wrapped(llm, tmp_path, "other")
    store.add(some_nodes(embedding, "d", "a"))
    other.add(some_nodes(embedding, "d", "b"))
    store.inner.delete_nodes(["a1", "a3"])
    if when == "asking":
        assert store.sync() == 2
    else:
        store.add(some_nodes(embedding, "d", "c")[:1])
    expected = {"a0", "a2", "a4", *(f"b{number}" for number in range(5))} | ({"c0"} if when == "adding" else set())
    assert set(llm.engine.ids()) == expected


def test_what_was_made_for_one_query_leaves_nothing(
    make_llm: MakeLLM, tmp_path: Path, embedding: WordEmbedding
) -> None:
    llm = make_llm(store=tmp_path / "kv")
    index = VectorStoreIndex.from_documents(
        [Document(text=" ".join(FACTS), id_="d")],
        storage_context=StorageContext.from_defaults(vector_store=wrapped(llm, tmp_path)),
        embed_model=embedding,
    )
    synthesizer = BlendSynthesizer(llm)
    cited = CitationQueryEngine.from_args(
        index, llm, response_synthesizer=synthesizer, citation_chunk_size=32, citation_chunk_overlap=0
    )

    def ask(number: int) -> tuple[set[str], int, int]:
        answer = [NodeWithScore(node=TextNode(text=f"Sub question: Who is {number}?\nResponse: Mara {number}"))]
        synthesizer.synthesize("Who?", answer)
        cited.query(FACTS[number % len(FACTS)])
        llm.engine.flush()
        figures = llm.engine.store.stats()
        return set(llm.engine.ids()), figures.nodes, figures.entries

    before = ask(0)
    assert all(ask(number) == before for number in range(1, 12))


def test_what_the_index_has_without_a_document_is_kept(llm: BlendLLM, chroma: ChromaVectorStore) -> None:
    store = BlendVectorStore(chroma, engine=llm.engine)
    node = TextNode(text=FACTS[0], id_="a", embedding=[1.0])
    store.inner.add([node])
    BlendSynthesizer(llm).synthesize("Who?", [NodeWithScore(node=node)])
    llm.engine.flush()
    assert llm.engine.ids() == ["a"]
    store.delete_nodes(["a"])
    assert not llm.engine.ids()
