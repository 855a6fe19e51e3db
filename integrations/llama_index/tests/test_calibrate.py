"""Calibration of a query engine: its own prompts, under its own settings."""

from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import CustomQueryEngine

from cacheblend_attachments import calibrate as calibrate_prompts
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import Nodes, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, calibrate, install
from llama_index_cacheblend.report import Calls

QUESTIONS = ["Where was Mara Lindell born?", "Who runs the harbour office?", "Who paints ships?"]
ASKED: dict[str, Any] = {"ratios": (0.0, 0.5), "target": 0.3, "max_new_tokens": 6}


@pytest.fixture
def index(nodes: Nodes, embedding: WordEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex([each.node for each in nodes], embed_model=embedding)


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.full)], ids=["whole", "streamed"])
def test_it_finds_what_prompts_show(index: VectorStoreIndex, llm: BlendLLM, streaming: bool) -> None:
    synthesizer = BlendSynthesizer(llm=llm, streaming=streaming, blend_config=BlendConfig(selector="boundary"))
    query_engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=2)
    found = calibrate(query_engine, QUESTIONS, **ASKED)
    assert (found.questions, found.skipped, found.selector) == (3, 0, "boundary")
    with Calls() as calls:
        for question in QUESTIONS:
            str(query_engine.query(question))
    own = calibrate_prompts(llm.engine, [c.prompt for c in calls.made], blend=BlendConfig(selector="boundary"), **ASKED)
    assert own.recompute_ratio == found.recompute_ratio and len(own.rows) == len(found.rows)
    for row, other in zip(found.rows, own.rows, strict=True):
        assert replace(row, ttft_ratio=0.0) == replace(other, ttft_ratio=0.0)


def test_right_answers_and_another_selector_are_passed_on(index: VectorStoreIndex, llm: BlendLLM) -> None:
    install()
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=1)
    seen: list[str] = []
    plain = calibrate(query_engine, QUESTIONS, progress=seen.append, **ASKED)
    assert seen[0] == "asking question 1 of 3"
    other = calibrate(query_engine, QUESTIONS, answers=["Lisbon"] * 3, selector="random(seed=1)", **ASKED)
    assert other.selector == "random" and other.full_loss != plain.full_loss


class Unasked(CustomQueryEngine):
    """Must not be asked."""

    def custom_query(self, query_str: str) -> str:
        raise AssertionError(query_str)


def test_what_cannot_be_calibrated_is_said(index: VectorStoreIndex, llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match=r"target=0 must be above 0"):
        calibrate(Unasked(), QUESTIONS, target=0)
    with pytest.raises(ConfigError, match=r"questions='Where\?' is one text; give a list"):
        calibrate(Unasked(), "Where?")
    with pytest.raises(TypeError, match="ratio"):
        calibrate(Unasked(), QUESTIONS, ratio=0.5)
    with pytest.raises(ConfigError, match=r"query_engine is a BlendLLM; give what index.as_query_engine"):
        calibrate(llm, QUESTIONS)  # type: ignore[arg-type]
    compact = index.as_query_engine(llm=llm, similarity_top_k=1)
    with pytest.raises(ConfigError, match="none of 3 questions was answered by blending chunks"):
        calibrate(compact, QUESTIONS, **ASKED)
