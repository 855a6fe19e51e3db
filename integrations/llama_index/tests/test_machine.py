"""A stale answer is impossible: any sequence of calls on an index over Chroma, and of changes behind its back, against a model.

After every step a question is put to the whole index. The model must have been given the live texts, from KV of just these texts
behind others that are in their documents now, and say what it says where all of that is encoded anew; and the names that the
engine has must be those of nodes that somebody stands for.
"""

import shutil
import tempfile
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import chromadb
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode, TransformComponent
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.chunk import BlendPrompt, Chunk, text_hash
from cacheblend_rag.engine import GenerationResult
from cacheblend_rag.report import OTHER_TEXT
from cacheblend_rag.store import NodeRecord
from integrations.llama_index.tests.conftest import WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, warm_index
from tests.core.documents.test_machine import run_machine

# No text is part of another one, so that it can be looked for in a prompt.
LINES = ["Mara bakes bread.", "Otto paints ships.", "Lena dives deep.", "Ada counts stars.", "Ivo mends clocks."]
QUESTION = "Who does what?"
# Nothing is recomputed, so that every bit of KV counts.
REUSE = engine_settings(recompute_ratio=0.0, self_check=False, separator="\n\n")

DOCUMENTS = st.sampled_from(["d0", "d1", "d2"])
TEXTS = st.lists(st.sampled_from(LINES), min_size=1, max_size=2).map("\n".join)
PLACES = st.integers(0, 9)
# Lines of an old and a new text of a document may stand beside each other; so far apart none overlap.
PLACE = 100


class Lines(TransformComponent):
    """Makes a node of each line; a document's nodes keep their ids when it is updated."""

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        return [node for document in nodes for node in nodes_of(document.node_id, document.get_content())]


def nodes_of(document: str, text: str) -> list[BaseNode]:
    return [
        TextNode(
            id_=f"{document}/{number}",
            text=line,
            start_char_idx=PLACE * number,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)},
        )
        for number, line in enumerate(text.split("\n"))
    ]


class Watched:
    """An engine whose prompts and answers are kept."""

    def __init__(self, model: Any, tokenizer: Any, store: Path | None = None) -> None:
        self.engine = BlendEngine(model, tokenizer, store=store, **REUSE)
        self.llm = BlendLLM(engine=self.engine, max_new_tokens=6)
        self.asked: list[tuple[BlendPrompt, GenerationResult]] = []
        generate = self.engine.generate

        def noting(prompt: BlendPrompt, *args: Any, **kwargs: Any) -> GenerationResult:
            result = generate(prompt, *args, **kwargs)
            self.asked.append((prompt, result))
            return result

        self.engine.generate = noting  # type: ignore[method-assign]

    def answer(self, nodes: Any) -> tuple[BlendPrompt, GenerationResult]:
        BlendSynthesizer(llm=self.llm).synthesize(QUESTION, nodes)
        return self.asked.pop()

    def answer_anew(
        self, prompt: BlendPrompt, names: dict[str, Chunk], records: Collection[NodeRecord]
    ) -> GenerationResult:
        """Return what comes of a prompt where these names, and no others, were just given, and nothing is encoded."""
        met = [str(each.id) for each in prompt.segments if isinstance(each, Chunk)]
        self.engine.delete([*self.engine.ids(), *met])
        self.engine._store.name(self.engine.namespace, records)
        segments = [
            (each if names.get(str(each.id), each).text == each.text else Chunk(each.text))
            if isinstance(each, Chunk)
            else each
            for each in prompt.segments
        ]
        return self.engine.generate(BlendPrompt(segments=segments), 6)


class IndexMachine(RuleBasedStateMachine):
    """An index over Chroma, another program that writes to the same collection, and what there should be."""

    def __init__(self, model: Any, tokenizer: Any, naive: Watched) -> None:
        super().__init__()
        self.model, self.tokenizer, self.naive = model, tokenizer, naive
        self.client = chromadb.EphemeralClient()
        self.collection = self.client.create_collection(f"machine-{uuid.uuid4().hex}")
        self.folder = Path(tempfile.mkdtemp())
        # In the collection: the document and the text of each node.
        self.live: dict[str, tuple[str, str]] = {}
        # In the engine: the chunk of each name, which was added.
        self.names: dict[str, Chunk] = {}
        self.open()

    def open(self) -> None:
        self.watched = Watched(self.model, self.tokenizer, self.folder / "kv")
        self.engine = self.watched.engine
        chroma = ChromaVectorStore(chroma_collection=self.collection)
        self.store = BlendVectorStore(chroma, engine=self.engine)
        self.embedding = WordEmbedding(model_name="words")
        self.index = VectorStoreIndex.from_vector_store(
            self.store, embed_model=self.embedding, transformations=[Lines()]
        )

    # What the index is asked to do.

    def _added(self, document: str, text: str) -> None:
        nodes = nodes_of(document, text)
        self._synced({document} if nodes else set(), {node.node_id for node in nodes})
        for node in nodes:
            self.live[node.node_id] = (document, node.get_content())
            self.names[node.node_id] = self._chunk(node.node_id)

    def _chunk(self, node_id: str) -> Chunk:
        document, text = self.live[node_id]
        return Chunk(text, node_id, document=document, start=PLACE * int(node_id.split("/")[1]))

    def _gone(self, node_ids: set[str], whole: str | None = None) -> None:
        """Take nodes away, all of a `whole` document."""
        for node_id in self.live.keys() | self.names.keys():
            if node_id in node_ids or node_id.split("/")[0] == whole:
                self.live.pop(node_id, None)
                self.names.pop(node_id, None)

    def _synced(self, documents: set[str], spared: set[str]) -> None:
        """Take away the names of nodes of documents that were deleted behind the store's back."""
        for id in self.names.keys() - self.live.keys() - spared:
            if id.split("/")[0] in documents:
                del self.names[id]

    @rule(document=DOCUMENTS, text=TEXTS)
    def insert(self, document: str, text: str) -> None:
        self.index.insert(Document(text=text, id_=document))
        self._added(document, text)
        self.check()

    @rule(document=DOCUMENTS, text=TEXTS)
    def update(self, document: str, text: str) -> None:
        self.index.update_ref_doc(Document(text=text, id_=document))
        self._gone(set(), document)
        self._added(document, text)
        self.check()

    @rule(document=DOCUMENTS)
    def delete(self, document: str) -> None:
        self.index.delete_ref_doc(document, delete_from_docstore=True)
        self._gone(set(), document)
        self.check()

    @precondition(lambda self: self.live)
    @rule(place=PLACES)
    def delete_a_node(self, place: int) -> None:
        self.index.delete_nodes([node_id := self._at(place)])
        self._gone({node_id})
        self.check()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self._gone({*self.live})
        self.check()

    @rule()
    def warm(self) -> None:
        warm_index(self.index)
        self.names.update({node_id: self._chunk(node_id) for node_id in self.live})
        self._synced({document for document, _ in self.live.values()}, set())
        self.check()

    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.open()
        self.check()

    # What others do to the collection.

    def _at(self, place: int) -> str:
        return sorted(self.live)[place % len(self.live)]

    @precondition(lambda self: self.live)
    @rule(place=PLACES, line=st.sampled_from(LINES))
    def change_behind_its_back(self, place: int, line: str) -> None:
        node_id = self._at(place)
        self.collection.update(ids=[node_id], documents=[line], embeddings=[self.embedding.get_text_embedding(line)])
        self.live[node_id] = (self.live[node_id][0], line)
        self.check()

    @precondition(lambda self: self.live)
    @rule(place=PLACES)
    def delete_behind_its_back(self, place: int) -> None:
        self.collection.delete(ids=[node_id := self._at(place)])
        del self.live[node_id]
        self.check()

    @rule(document=DOCUMENTS, text=TEXTS)
    def add_behind_its_back(self, document: str, text: str) -> None:
        nodes = [node for node in nodes_of(document, text) if node.node_id not in self.live]
        for node in nodes:
            node.embedding = self.embedding.get_text_embedding(node.get_content())
            self.live[node.node_id] = (document, node.get_content())
        if nodes:
            ChromaVectorStore(chroma_collection=self.collection).add(nodes)
        self.check()

    # What must be true then.

    def check(self) -> None:
        nodes = self.index.as_retriever(similarity_top_k=50).retrieve(QUESTION)
        assert {each.node_id: each.text for each in nodes} == {id: text for id, (_, text) in self.live.items()}
        if nodes:
            self._check_answer(nodes)
        self.engine.flush()
        records = self._records()
        assert {id: r.text_hash for id, r in records.items()} == {id: text_hash(c.text) for id, c in self.names.items()}
        for id, record in records.items():
            seen = {} if record.later is None else dict(record.later.seen)
            assert all(records[other].key == key for other, key in seen.items())
            assert all(other != id and other.split("/")[0] == id.split("/")[0] for other in seen)
            if seen:
                behind = self.tokenizer.decode(record.later.behind)
                assert {line for line in LINES if line in behind} == {self.names[other].text for other in seen}

    def _records(self) -> dict[str, NodeRecord]:
        return {record.id: record for record in self.engine.records(self.engine.ids()) if record is not None}

    def _check_answer(self, nodes: Any) -> None:
        prompt, result = self.watched.answer(nodes)
        text = self.tokenizer.decode(self.engine.prompt_ids(prompt))
        assert {line for line in LINES if line in text} == {each.text for each in nodes}
        for chunk in result.report.chunks:
            live, named = self.live[str(chunk.id)][1], self.names.get(str(chunk.id))
            if named is not None and named.text != live:
                assert chunk.hit or chunk.reason == OTHER_TEXT
        self.engine.flush()
        records = self._records().values()
        assert self.naive.answer_anew(prompt, self.names, records).token_ids == result.token_ids

    def teardown(self) -> None:
        # What prompts alone brought goes with its ids, too.
        ids = [f"d{document}/{number}" for document in range(3) for number in range(2)]
        self.engine.delete([*ids, *self.engine.heads()])
        stats = self.engine.store.stats()
        assert (stats.nodes, stats.entries, stats.ram_bytes) == (0, 0, 0)
        self.engine.close()
        self.client.delete_collection(self.collection.name)
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("part", "examples", "steps"),
    [(0, 8, 12), *(pytest.param(part, 40, 40, marks=pytest.mark.full) for part in range(1, 11))],
)
def test_no_answer_is_stale(model: Any, tokenizer: Any, tmp_path: Path, part: int, examples: int, steps: int) -> None:
    # In a folder as well, since the keys of what is in RAM alone are its own.
    naive = Watched(model, tokenizer, tmp_path)
    run_machine(examples, steps, part, lambda: IndexMachine(model, tokenizer, naive), database=None)
    naive.engine.close()
