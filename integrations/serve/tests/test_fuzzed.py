"""Requests that nobody would send, drawn from the server's own description: each is answered, or refused with a reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from transformers import LlamaForCausalLM

from cacheblend_serve.app import make_app
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.settings import ServeConfig
from integrations.serve.tests.conftest import engine_of

HERE = {"Host": "localhost"}
SAMPLED, ALL = 12, 500


@pytest.fixture
def app(tiny: LlamaForCausalLM) -> Iterator[FastAPI]:
    with engine_of(tiny) as engine:
        yield make_app(EngineBackend(engine), ServeConfig(output_tokens=3, timeout_s=20))


@pytest.fixture
def operations(app: FastAPI) -> list[Any]:
    return [
        each.ok() for each in schemathesis.openapi.from_asgi("/openapi.json", app, headers=HERE).get_all_operations()
    ]


def answered(case: schemathesis.Case) -> int:
    """Return the status of a case, which is answered or refused with a reason, and without a word about this machine."""
    reply = case.call(headers=HERE)
    # A caller may give an answer less time than it takes.
    assert reply.status_code < 500 or (reply.status_code == 504 and case.body.get("timeout_s", 20) < 1), reply.text
    if reply.status_code >= 400 and reply.status_code != 405:
        assert json.loads(reply.content)["error"]["message"]
    assert b"Traceback" not in reply.content
    assert b"/site-packages/" not in reply.content
    return int(reply.status_code)


def says_null(body: Any) -> bool:
    """Whether anything in a body is null, which is taken for what is not given."""
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return body is None or any(map(says_null, inner))


@pytest.mark.parametrize(
    "count", [SAMPLED, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=["sampled", "all"]
)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_whatever_is_sent_is_answered_or_refused(operations: list[Any], count: int, mode: GenerationMode) -> None:
    assert {each.path for each in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/chunks"}
    for operation in operations if mode is GenerationMode.POSITIVE else [each for each in operations if each.body]:

        @given(case=operation.as_strategy(generation_mode=mode))
        # The sample is always the same; what it finds, every run finds.
        @settings(max_examples=count, suppress_health_check=list(HealthCheck), derandomize=count == SAMPLED)
        def check(case: schemathesis.Case) -> None:
            status = answered(case)
            # What is not as the description says is refused: nothing is passed over.
            if mode is GenerationMode.NEGATIVE and not says_null(case.body):
                assert status >= 400, case.body

        check()
