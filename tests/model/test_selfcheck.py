"""A model whose forward changes under us is caught when an engine is made, and answers all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend_lab.families import prove
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import UnsupportedModelError
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words


def mixes_rows(layer: nn.Module) -> None:
    """Have a layer add the mean of all rows that it is given: it then depends on more than its rows and their KV."""
    own = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        states: torch.Tensor = own(hidden_states, *args, **kwargs)
        return states + hidden_states.mean(dim=1, keepdim=True)

    layer.forward = forward  # type: ignore[method-assign]


def knows_the_position(layer: nn.Module) -> None:
    """Have a layer's values depend on the position."""
    own = layer.self_attn.v_proj.forward

    def forward(states: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = own(states)
        return values * (1 + torch.arange(states.shape[1])[None, :, None])

    layer.self_attn.v_proj.forward = forward


def fails_on_some_rows(layer: nn.Module) -> None:
    """Have a layer raise when its rows have a gap."""
    own = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, position_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if (position_ids.diff() != 1).any():
            raise RuntimeError("rows are missing")
        states: torch.Tensor = own(hidden_states, *args, position_ids=position_ids, **kwargs)
        return states

    layer.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("patch", "reason"),
    [(mixes_rows, "off by"), (knows_the_position, "off by"), (fails_on_some_rows, "rows are missing")],
)
def test_a_patched_layer_is_caught_and_prompts_are_prefilled_as_a_whole(
    make_engine: MakeEngine, patch: Callable[[nn.Module], None], reason: str
) -> None:
    model = tiny_model("llama")
    patch(model.model.layers[3])
    with pytest.raises(UnsupportedModelError, match=reason):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True))
    engine = make_engine(model=model)
    engine.add([Chunk(words(20, 1), "n")])
    prompt = BlendPrompt(words(4, 2), ["n"], words(5, 3))
    result = engine.prefill(prompt)
    assert result.report.fallback_reason is not None and reason in result.report.fallback_reason
    own = model(input_ids=torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]
    assert (result.logits - own).abs().max() < 1e-5
    layers = engine.capability().layers
    assert len(layers) == 6 and all("prefilled in full" in layer.blending for layer in layers)


def test_without_the_check_a_patched_layer_gives_wrong_answers(make_engine: MakeEngine) -> None:
    """What the check is for: the inspection alone does not see it."""
    model = tiny_model("llama")
    mixes_rows(model.model.layers[3])
    engine = make_engine(model=model, self_check=False, strict=True)
    assert engine.unsupported_reason is None


def test_the_proof_of_a_patched_model_is_a_refusal_that_answers_as_the_model_does() -> None:
    model = tiny_model("llama")
    mixes_rows(model.model.layers[3])
    proof = prove(model)
    assert proof.refused is not None and not proof.is_exact and not proof.failed


def test_a_model_that_keeps_states_instead_of_kv_answers_through_its_own_cache(make_engine: MakeEngine) -> None:
    from cacheblend_lab.families import tiny_config
    from cacheblend_lab.families import tiny_model as random_model

    model = random_model(tiny_config("mamba"))
    engine = make_engine(model=model)
    engine.add([Chunk(words(20, 1), "n")])
    prompt = BlendPrompt(words(4, 2), ["n"], words(5, 3))
    ids = torch.tensor([engine.prompt_ids(prompt)])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    result = engine.generate(prompt, 6, do_sample=False)
    assert result.token_ids == tuple(wanted[0, ids.shape[1] :].tolist())
    assert result.report.fallback_reason is not None and "no KV for each token" in result.report.fallback_reason
