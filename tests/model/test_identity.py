"""KV is never served to a model that is not the one that computed it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_lab.families import prove
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import model_fingerprint
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

# PEFT asks models for an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CHUNKS = [Chunk(words(20, seed), f"n{seed}") for seed in range(2)]
PROMPT = BlendPrompt(words(4, 10), CHUNKS, words(6, 11))


def another_weight(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.model.layers[5].mlp.down_proj.weight[0, 0] += 1e-3
    return model


def another_dtype(model: PreTrainedModel) -> PreTrainedModel:
    return model.to(torch.bfloat16)


def another_scaling(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    scaled: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    scaled.load_state_dict(model.state_dict())
    return scaled


def another_base(model: PreTrainedModel) -> PreTrainedModel:
    model.model.rotary_emb.inv_freq *= 0.5
    return model


def with_adapters(model: PreTrainedModel, *names: str) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, config)
    return adapted.eval()


def hits(model: PreTrainedModel, folder: Path) -> int:
    with BlendEngine(model, tiny_tokenizer(), store=folder, **engine_settings(strict=True)) as engine:
        found = engine.prefill(PROMPT).report.hits
        engine.add(CHUNKS)
    return found


@pytest.mark.parametrize("change", [another_weight, another_dtype, another_scaling, another_base])
def test_a_changed_model_finds_nothing(change: Callable[[PreTrainedModel], PreTrainedModel], tmp_path: Path) -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=tmp_path) as engine:
        engine.add(CHUNKS)
    assert hits(tiny_model("llama"), tmp_path) == 2
    assert hits(change(tiny_model("llama")), tmp_path) == 0
    assert hits(tiny_model("llama"), tmp_path) == 2


def test_each_adapter_has_kv_of_its_own(tmp_path: Path) -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=tmp_path) as engine:
        engine.add(CHUNKS)
    model = with_adapters(tiny_model("llama"), "first", "second")
    assert hits(model, tmp_path) == 0
    assert hits(model, tmp_path) == 2
    model.set_adapter("second")
    assert hits(model, tmp_path) == 0
    with model.disable_adapter():
        assert hits(model, tmp_path) == 0
    model.set_adapter("first")
    assert hits(model, tmp_path) == 2


@pytest.mark.filterwarnings("ignore")
def test_blending_under_an_adapter_is_exact() -> None:
    proof = prove(with_adapters(tiny_model("qwen2"), "first"))
    assert proof.is_exact, proof


def test_an_engine_refuses_a_model_that_was_changed_under_it(make_engine: MakeEngine) -> None:
    model = with_adapters(tiny_model("llama"), "first", "second")
    engine = make_engine(model=model)
    engine.add(CHUNKS)
    wanted = engine.prefill(PROMPT).logits
    model.set_adapter("second")
    with pytest.raises(ConfigError, match="adapters"):
        engine.prefill(PROMPT)
    model.set_adapter("first")
    assert torch.equal(engine.prefill(PROMPT).logits, wanted)
    weight = model.get_decoder().layers[2].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(1.01)
    with pytest.raises(ConfigError, match="up_proj"):
        engine.generate(PROMPT, 2)
    with pytest.raises(ConfigError):
        engine.add([Chunk(words(9, 30), "new")])


def test_what_does_not_matter_to_kv_does_not_change_the_fingerprint() -> None:
    one, other = tiny_model("llama"), tiny_model("llama")
    other.config._name_or_path = "elsewhere"
    assert model_fingerprint(one) == model_fingerprint(other)
    assert model_fingerprint(one) != model_fingerprint(tiny_model("llama", seed=1))
