"""Requests that nobody would send, drawn from the server's own description: each is answered or refused with a reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from transformers import LlamaForCausalLM

from cacheblend_serve.app import make_app
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.settings import ServeConfig
from integrations.serve.tests.conftest import engine_of

ADDRESSES = 20
HERE = {"Host": "localhost"}
SAMPLED, ALL = 140, 10_000


@pytest.fixture(scope="module")
def app(tiny: LlamaForCausalLM) -> Iterator[FastAPI]:
    with engine_of(tiny) as engine:
        yield make_app(EngineBackend(engine), ServeConfig(output_tokens=3, timeout_s=20))


@pytest.fixture
def api(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=HERE)


def _is_answered(case: schemathesis.Case) -> None:
    reply = case.call(headers=HERE)
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400 and reply.status_code != 405:
        assert json.loads(reply.content)["error"]["message"]
    # Nothing of this machine.
    assert b"Traceback" not in reply.content
    assert b"/site-packages/" not in reply.content


@pytest.mark.parametrize(
    "count", [SAMPLED, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=["sampled", "all"]
)
def test_whatever_is_sent_is_answered_or_refused(api: Any, count: int) -> None:
    operations = [each.ok() for each in api.get_all_operations()]
    assert len(operations) == ADDRESSES
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=count // ADDRESSES,
            suppress_health_check=list(HealthCheck),
            # The sample is always the same; what it finds, every run finds.
            derandomize=count == SAMPLED,
        )
        def check(case: schemathesis.Case) -> None:
            _is_answered(case)

        check()
