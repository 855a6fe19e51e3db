"""LangChain's own suites, and clients of a server, with a GGUF model behind them."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from cacheblend_gguf import GGUFEngine, LlamaOptions
from cacheblend_gguf.llama import Llama
from cacheblend_rag import EngineConfig
from cacheblend_rag.chunk import BLANK_LINE
from integrations.gguf.tests.kit import smollm
from integrations.langchain.tests.test_standard import (  # noqa: F401  # run here as well
    TestChatBlendIntegration,
)
from integrations.serve.tests.conftest import serving
from integrations.serve.tests.test_clients import (  # noqa: F401
    CHUNKS,
    QUESTION,
    test_openai_is_answered,
)
from tests.thinking import TOOL_TEMPLATE


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFEngine]:
    """What the suites call the model that they ask."""
    path = smollm(tmp_path_factory.mktemp("model"))
    with GGUFEngine.from_pretrained(path, n_ctx=2048, config=EngineConfig(separator=BLANK_LINE)) as engine:
        engine.model_name = "reference"
        yield engine


@pytest.fixture(scope="module")
def tool_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFEngine]:
    llama = Llama(smollm(tmp_path_factory.mktemp("model")), LlamaOptions(n_ctx=2048))
    llama.tokenizer.chat_template = TOOL_TEMPLATE.replace("<|", "<|im_start|>").replace("|>\n", "\n")
    with GGUFEngine(llama) as engine:
        yield engine
    llama.close()


@pytest.fixture(scope="module")
def address(reference: GGUFEngine) -> Iterator[str]:
    with serving(reference) as address:
        items = [{"id": f"c{number}", "text": text} for number, text in enumerate(CHUNKS)]
        assert httpx.post(f"{address}/v1/chunks", json={"chunks": items}, timeout=60).status_code == 200
        yield address


class Place(BaseModel):
    """Where something is."""

    name: str
    people: int


def test_openai_has_forms_stops_and_seeds(address: str) -> None:
    def ask(**options: Any) -> str:
        asked = {"model": "reference", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40} | options
        return client.chat.completions.create(**asked).choices[0].message.content

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        schema = {"name": "place", "schema": Place.model_json_schema()}
        Place.model_validate_json(ask(response_format={"type": "json_schema", "json_schema": schema}))
        # From the second time on, all but the prompt's last token is at hand, and rounding is the same.
        _, *drawn = [ask(temperature=1.5, seed=seed) for seed in (3, 3, 3, 4)]
        assert drawn[0] == drawn[1] != drawn[2]
        whole = ask()
        assert ask(stop=[" the"]) == whole.split(" the")[0]
