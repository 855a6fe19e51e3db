"""The retriever that has KV fetched: what it retrieves, and that fetching goes on while postprocessors work."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import Nodes, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendSynthesizer
from llama_index_cacheblend.nodes import node_chunks

QUESTION = "Where was Mara Lindell born?"


@pytest.fixture
def disk_llm(tmp_path: Path, model: LlamaForCausalLM, tokenizer: Any, nodes: Nodes) -> Iterator[BlendLLM]:
    """A model whose chunks are on disk, and nothing in RAM."""
    settings = engine_settings(recompute_ratio=0.15, self_check=False, selector="hkvd")
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as first:
        first.add(node_chunks(each.node for each in nodes))
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as engine:
        yield BlendLLM(engine=engine, max_new_tokens=6)


@pytest.fixture
def index(nodes: Nodes, embedding: WordEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex([each.node for each in nodes], embed_model=embedding)


class Waits(BaseNodePostprocessor):
    """Works for as long as it takes that the KV is in RAM, and keeps the first nodes."""

    ram_bytes: Callable[[], int]
    keeps: int = 3
    found_s: float = -1.0

    def _postprocess_nodes(self, nodes: Nodes, query_bundle: QueryBundle | None = None) -> Nodes:
        started = time.monotonic()
        while not self.ram_bytes() and time.monotonic() < started + 60:
            time.sleep(0.01)
        # The last chunk may still be on its way, which its prompt waits for.
        self.found_s = time.monotonic() - started
        return nodes[: self.keeps]


def test_kv_comes_to_ram_while_postprocessors_work(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    assert disk_llm.engine._store.stats().ram_bytes == 0
    waits = Waits(ram_bytes=lambda: disk_llm.engine._store.stats().ram_bytes)
    engine = RetrieverQueryEngine(
        BlendRetriever(index.as_retriever(similarity_top_k=5), disk_llm),
        BlendSynthesizer(llm=disk_llm),
        node_postprocessors=[waits],
    )
    response = engine.query(QUESTION)
    assert 0 <= waits.found_s < 60
    chunks = response.metadata["blend"]["chunks"]
    assert len(chunks) == 3
    assert "ram" in [chunk["tier"] for chunk in chunks]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_it_retrieves_what_the_other_one_does(form: str, disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever(similarity_top_k=4)
    fetching = BlendRetriever(plain, engine=disk_llm.engine, limit=2)

    def shown(retriever: Any) -> list[tuple[str, float | None]]:
        found = retriever.retrieve(QUESTION) if form == "sync" else asyncio.run(retriever.aretrieve(QUESTION))
        return [(each.node_id, each.score) for each in found]

    assert shown(fetching) == shown(plain)
    names = [name for name, _ in shown(plain)]
    assert disk_llm.engine.prefetch(names[:2]).wait(60)
    one_chunk = disk_llm.engine._store.stats().ram_bytes / 2
    # Only two of the four: the third costs as much again, more or less.
    assert disk_llm.engine.prefetch(names).wait(60)
    assert disk_llm.engine._store.stats().ram_bytes > 2.5 * one_chunk


def test_what_it_does_not_know_is_the_retrievers(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever(similarity_top_k=4)
    fetching = BlendRetriever(plain, disk_llm)
    assert fetching.retriever is plain
    assert fetching.similarity_top_k == 4
    assert fetching._get_prompt_modules() == {"retriever": plain}
    with pytest.raises(AttributeError):
        fetching.no_such_thing  # noqa: B018


def test_arguments_that_make_no_sense_are_refused(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever()
    for arguments in ({}, {"llm": disk_llm, "engine": disk_llm.engine}):
        with pytest.raises(ConfigError, match="either llm"):
            BlendRetriever(plain, **arguments)
    with pytest.raises(ConfigError, match="MockLLM, which has no stored KV"):
        BlendRetriever(plain, MockLLM())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit=0 fetches nothing"):
        BlendRetriever(plain, disk_llm, limit=0)
