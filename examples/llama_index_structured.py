"""Structured output, constrained to its schema. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys
from typing import Literal

from llama_index.core import SummaryIndex
from llama_index.core.schema import TextNode
from pydantic import BaseModel

import llama_index_cacheblend
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


def main(model: str = "Qwen/Qwen2.5-1.5B-Instruct") -> None:
    llama_index_cacheblend.install()  # enables response_mode="blend"
    llm = BlendLLM(model=model, max_new_tokens=60)
    index = SummaryIndex([TextNode(text=text) for text in FACTS])
    warm_index(index, engine=llm.engine)
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", output_cls=Work)

    for question in ("What is the trade of Marta Tavman?", "What is the trade of Sella Borler?"):
        response = query_engine.query(question)
        print(f"{question}\n  {response.response!r}, {response.metadata['blend']['hits']} of {len(FACTS)} chunks hit")


if __name__ == "__main__":
    main(*sys.argv[1:2])
