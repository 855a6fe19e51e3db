"""LangChain's own suites for integrations, on the shipped reference model.

The reference model has 3.4 million weights and has learnt to answer questions from short texts, not to call tools or to write
what a schema describes; its chat template has no tools. So the suites run twice: on the model as it is shipped, and with a
template that shows tools. What is expected to fail there says so, with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cacheblend_rag import BlendConfig, BlendEngine, Chunk
from langchain_cacheblend import ChatBlend

CONFIG = {"self_check": False}
CACHED = "The harbour of Ostwick was built of grey stone, and its tower can be seen from the hills.\n"

# The form of Qwen and Hermes, with the roles that the reference model knows.
TOOL_TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write each call as JSON with a name and arguments between <tool_call></tool_call> tags.
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|user|>
<tool_response>
{{ message.content }}
</tool_response>
{% else %}<|{{ message.role }}|>
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


@pytest.fixture(scope="module")
def _engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained("reference", config=BlendConfig(**CONFIG)) as engine:
        engine.add([Chunk(CACHED, "harbour")])
        yield engine


@pytest.fixture(scope="module")
def _tool_engine(_engine: BlendEngine) -> Iterator[BlendEngine]:
    tokenizer = copy.deepcopy(_engine.tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    with BlendEngine(_engine.model, tokenizer, config=BlendConfig(**CONFIG)) as engine:
        yield engine


class _Chat:
    """What all the suites are told."""

    expected_failures: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _expect(self, request: pytest.FixtureRequest) -> None:
        reason = self.expected_failures.get(request.node.originalname)
        if reason:
            request.node.add_marker(pytest.mark.xfail(reason=reason))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def supports_model_override(self) -> bool:
        return False  # the weights are in this process; another model is another object

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatBlendUnit(_Chat, ChatModelUnitTests):
    """Loads the model for each test, as ``ChatBlend(model=...)`` does."""

    expected_failures: ClassVar[dict[str, str]] = {
        "test_with_structured_output": "the small model's template has no tools: method='function_calling' is refused"
    }

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "reference", "store": "kv", "blend_config": CONFIG}

    @property
    def has_tool_calling(self) -> bool:
        return False  # the template has none

    @property
    def has_tool_choice(self) -> bool:
        return False


class _Shared(_Chat):
    """Answers with an engine that all tests share."""

    engine: BlendEngine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}


class TestChatBlendUnitWithTools(_Shared, ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _use(self, _tool_engine: BlendEngine) -> None:
        type(self).engine = _tool_engine


class TestChatBlendIntegration(_Shared, ChatModelIntegrationTests):
    expected_failures: ClassVar[dict[str, str]] = {
        "test_json_mode": "the small model writes a string without end where nothing but JSON is asked for"
    }

    @pytest.fixture(autouse=True)
    def _use(self, _engine: BlendEngine) -> None:
        type(self).engine = _engine

    @property
    def has_tool_calling(self) -> bool:
        return False  # the template has none; see TestChatBlendIntegrationWithTools

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatBlend(engine=self.engine, max_tokens=5)
        messages = [HumanMessage(f"{CACHED}\nQuestion: What was the harbour built of?")]
        message = llm.invoke(messages)
        if stream:
            pieces = list(llm.stream(messages))
            message = sum(pieces[1:], start=pieces[0])
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message


class TestChatBlendIntegrationWithTools(_Shared, ChatModelIntegrationTests):
    expected_failures: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def _use(self, _tool_engine: BlendEngine) -> None:
        type(self).engine = _tool_engine
