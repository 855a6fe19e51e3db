"""What calibration learns from a query engine is what it learns from the engine's prompts."""

from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex

from cacheblend_attachments import calibrate as calibrate_prompts
from cacheblend_rag import BlendConfig
from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, calibrate
from llama_index_cacheblend.llm import recording

QUESTIONS = ["Where was Mara Lindell born?", "Who runs the harbour office?", "Who paints ships?"]
ASKED: dict[str, Any] = {"ratios": (0.0, 0.5), "target": 0.3, "max_new_tokens": 6}


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_it_finds_what_prompts_show(index: VectorStoreIndex, llm: BlendLLM, streaming: bool) -> None:
    blend = BlendConfig(selector="boundary")
    synthesizer = BlendSynthesizer(llm=llm, streaming=streaming, blend_config=blend)
    query_engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=2)
    found = calibrate(query_engine, QUESTIONS, **ASKED)
    assert (found.questions, found.skipped, found.selector) == (3, 0, "boundary")
    calls: list[ModelCall] = []
    token = recording.set(calls)
    for question in QUESTIONS:
        str(query_engine.query(question))
    recording.reset(token)
    own = calibrate_prompts(llm.engine, [call.prompt for call in calls], blend=blend, **ASKED)
    assert own.recompute_ratio == found.recompute_ratio and len(own.rows) == len(found.rows)
    for row, other in zip(found.rows, own.rows, strict=True):
        assert replace(row, ttft_ratio=0.0) == replace(other, ttft_ratio=0.0)


def test_what_cannot_be_calibrated_is_refused(index: VectorStoreIndex, llm: BlendLLM) -> None:
    blend = index.as_query_engine(llm=llm, response_synthesizer=BlendSynthesizer(llm=llm))
    for engine, questions, options in (
        (blend, QUESTIONS, {"target": 0}),
        (blend, "Where?", {}),
        (llm, QUESTIONS, {}),
        (index.as_query_engine(llm=llm, similarity_top_k=1), QUESTIONS, ASKED),
    ):
        with pytest.raises(ConfigError):
            calibrate(engine, questions, **options)  # type: ignore[arg-type]
