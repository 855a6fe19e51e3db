"""Models that torch has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_lab.families import prove
from cacheblend_rag.model import model_fingerprint
from tests.families import tiny_model

# "eager" has dynamo trace and guard, which is where hooks are lost, and leaves out the slow generation of code.
BACKEND = "eager"
pytestmark = pytest.mark.filterwarnings("ignore")


def in_place(model: PreTrainedModel) -> Any:
    model.compile(backend=BACKEND)
    return model


def layer_by_layer(model: PreTrainedModel) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def wrapped(model: PreTrainedModel) -> Any:
    return torch.compile(model, backend=BACKEND)


@pytest.mark.parametrize(
    "compiled", [layer_by_layer, *(pytest.param(each, marks=pytest.mark.full) for each in (in_place, wrapped))]
)
def test_a_compiled_model_is_blended_all_the_same(compiled: Callable[[PreTrainedModel], Any]) -> None:
    model = compiled(tiny_model("llama"))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 40)[None])
    proof = prove(model)
    assert proof.is_exact, proof
    assert model_fingerprint(model) == model_fingerprint(tiny_model("llama"))
    torch.compiler.reset()
