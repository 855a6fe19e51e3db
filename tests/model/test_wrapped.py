"""What is done around a model's forward is done whatever PEFT or the user has put around the model."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_attachments import Repair, SnapKV, SourceAttention
from cacheblend_attachments.watching import watch_forward
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.backend import Attachment
from cacheblend_rag.errors import UnsupportedModelError
from tests.families import tiny_model, tiny_tokenizer, words

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15)
CHUNKS = [Chunk(words(20, seed), f"n{seed}") for seed in range(3)]
PROMPT = BlendPrompt(words(4, 10), CHUNKS, words(6, 11))
TOKENS = 8
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}

Wrap = Callable[[PreTrainedModel], Any]


def adapter(model: PreTrainedModel) -> Any:
    # Until it is trained it changes nothing.
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def causal_adapter(model: PreTrainedModel) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))


def patched(model: PreTrainedModel) -> Any:
    own = model.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    model.forward = forward
    return model


WRAPS = [adapter, causal_adapter, patched]


def _answer(engine: BlendEngine, *attached: Attachment, **settings: Any) -> dict[str, Any]:
    for each in attached:
        engine.attach(each)
    result = engine.generate(PROMPT, TOKENS, blend=blend_settings(engine.blend, **settings), do_sample=False)
    report = result.report
    return {
        "tokens": result.token_ids,
        "repaired": report.repaired_tokens,
        "evicted": report.evicted_tokens,
        "kv_bytes": report.kv_bytes,
        "recomputed": [chunk.recomputed_tokens for chunk in report.chunks],
        "attention": [chunk.attention for chunk in report.chunks],
    }


def _batch(engine: BlendEngine) -> dict[str, Any]:
    other = BlendPrompt(words(4, 13), CHUNKS[1:], words(5, 14))
    results = engine.generate_many([PROMPT, other], TOKENS, do_sample=False)
    return {str(number): (each.token_ids, each.report.batch_size) for number, each in enumerate(results)}


# What is compared, and what of it must be other than nothing on the plain model.
FEATURES: dict[str, tuple[Callable[[BlendEngine], dict[str, Any]], str]] = {
    "repair": (lambda engine: _answer(engine, Repair(0.5, limit=1e-4)), "repaired"),
    "eviction": (lambda engine: _answer(engine, SnapKV(0.25), selector="a3"), "evicted"),
    "sources": (lambda engine: _answer(engine, SourceAttention()), "attention"),
    "sources, full": (lambda engine: _answer(engine, SourceAttention(), enabled=False), "attention"),
    "batch": (_batch, "1"),
}


def _run(model: Any, feature: str) -> dict[str, Any]:
    with BlendEngine(model, tiny_tokenizer(), **SETTINGS) as engine:
        engine.add(CHUNKS)
        return FEATURES[feature][0](engine)


@cache
def _on_the_plain_model(feature: str) -> dict[str, Any]:
    found = _run(tiny_model("llama"), feature)
    assert found[FEATURES[feature][1]] not in (0, None, [None] * 3)
    return found


@cache
def _wrapped(wrap: Wrap) -> Any:
    return wrap(tiny_model("llama"))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_does_what_the_plain_one_does(wrap: Wrap, feature: str) -> None:
    wanted, found = _on_the_plain_model(feature), _run(_wrapped(wrap), feature)
    assert found.pop("attention", None) == pytest.approx(wanted.get("attention"), abs=1e-5)
    assert found == {name: value for name, value in wanted.items() if name != "attention"}


@pytest.mark.parametrize("wrap", [adapter, patched])
def test_a_forward_is_seen_once_by_generate_and_by_a_call(wrap: Wrap) -> None:
    model, plain, seen = _wrapped(wrap), tiny_model("llama"), list[tuple[int, ...]]()
    ids = torch.arange(3, 12)[None]

    def after(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        seen.append(tuple(output.logits.shape[:2]))
        output.logits = -output.logits
        return output

    with torch.no_grad(), watch_forward(model, after=after):
        assert torch.allclose(model(input_ids=ids).logits, -plain(input_ids=ids).logits, atol=1e-5)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert seen == [(1, 9), (1, 1)]
    with torch.no_grad():
        assert answer[0, -1] == plain(input_ids=ids).logits[0, -1].argmin()
        model(input_ids=ids)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("adapter_config", "reason"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PromptTuning"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PrefixTuning"),
        (peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]), "activated"),
    ],
    ids=["prompt", "prefix", "alora"],
)
def test_an_adapter_that_does_more_than_change_layers_is_refused(adapter_config: Any, reason: str) -> None:
    model = peft.get_peft_model(tiny_model("llama"), adapter_config).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(SETTINGS, self_check=False))
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(SETTINGS, strict=False)) as engine:
        result = engine.generate(PROMPT, TOKENS, do_sample=False)
        ids = torch.tensor([result.prompt_ids])
        own = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    assert own[0].tolist()[-len(result.token_ids) :] == list(result.token_ids)
    assert reason in str(result.report.fallback_reason)


def compiled_around(model: PreTrainedModel) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: PreTrainedModel) -> Any:
    model.compile(backend="eager")
    return model


def compiled_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def layer_by_layer(model: PreTrainedModel) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_around, compiled_in_place, compiled_forward, layer_by_layer])
def test_a_compiled_model_is_refused(compiled: Callable[[PreTrainedModel], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="compiled"):
        BlendEngine(compiled(tiny_model("llama")), tiny_tokenizer(), **SETTINGS)
