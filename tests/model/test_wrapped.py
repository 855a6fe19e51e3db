"""What is done around a model's forward is done whatever PEFT, torch.compile or the user has put around the model."""

import os
import threading
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_attachments import CompareAnswers, Repair, SnapKV, SourceAttention
from cacheblend_lab.families import prove
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.model import model_fingerprint, uncompiled, unwrapped, watch_forward
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

# "eager" has dynamo trace and guard, which is where hooks are lost, and leaves out the slow generation of code.
BACKEND = "eager"
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15)
CHUNKS = [Chunk(words(20, seed), f"n{seed}") for seed in range(3)]
PROMPT = BlendPrompt(words(4, 10), CHUNKS, words(6, 11))
TOKENS = 8

Wrap = Callable[[PreTrainedModel], Any]


def adapter(model: PreTrainedModel) -> Any:
    # Until it is trained it changes nothing.
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def causal_adapter(model: PreTrainedModel) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def patched(model: PreTrainedModel) -> Any:
    own = model.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    model.forward = forward
    return model


def compiled_around(model: PreTrainedModel) -> Any:
    return _used(torch.compile(model, backend=BACKEND))


def compiled_in_place(model: PreTrainedModel) -> Any:
    model.compile(backend=BACKEND)
    return _used(model)


def compiled_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward, backend=BACKEND)
    return _used(model)


def compiled_adapter(model: PreTrainedModel) -> Any:
    return _used(torch.compile(adapter(model), backend=BACKEND))


def adapter_on_compiled(model: PreTrainedModel) -> Any:
    return _used(adapter(compiled_in_place(model)))


def _used(model: Any) -> Any:
    """Have it compiled for any length before hooks come."""
    with torch.no_grad():
        for length in (37, 41):
            model(input_ids=torch.arange(3, 3 + length)[None])
    return model


COMPILED = [compiled_around, compiled_in_place, compiled_forward, compiled_adapter, adapter_on_compiled]
WRAPS = [adapter, causal_adapter, patched, *COMPILED]


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


def _compared(engine: BlendEngine) -> dict[str, Any]:
    compare = engine.attach(CompareAnswers(1))
    engine.generate(PROMPT, TOKENS, do_sample=False)
    assert compare.wait(120)
    status = compare.status()
    return {"compared": status.same + status.different, "f1": status.f1}


def _batch(engine: BlendEngine) -> dict[str, Any]:
    other = BlendPrompt(words(4, 13), CHUNKS[1:], words(5, 14))
    results = engine.generate_many([PROMPT, other], TOKENS, do_sample=False)
    return {str(number): (each.token_ids, each.report.batch_size) for number, each in enumerate(results)}


# What is compared, and what of it must be other than nothing on the plain model.
FEATURES: dict[str, tuple[Callable[[BlendEngine], dict[str, Any]], str]] = {
    "repair": (lambda engine: _answer(engine, Repair(0.5, limit=1e-4)), "repaired"),
    "eviction": (lambda engine: _answer(engine, SnapKV(0.25)), "evicted"),
    "eviction at the end": (lambda engine: _answer(engine, SnapKV(0.25), selector="query"), "evicted"),
    "eviction, full": (lambda engine: _answer(engine, SnapKV(0.25), enabled=False), "evicted"),
    "sources": (lambda engine: _answer(engine, SourceAttention()), "attention"),
    "sources, full": (lambda engine: _answer(engine, SourceAttention(), enabled=False), "attention"),
    "comparing": (_compared, "compared"),
    "batch": (_batch, "1"),
}
# Those in whose decoding a compiled model is compiled for one length after the other.
_SLOW = ("batch", "eviction, full", "comparing")


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


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _cases() -> Iterator[Any]:
    for wrap in WRAPS:
        for feature in FEATURES:
            sampled = wrap not in COMPILED or (wrap is compiled_in_place and feature not in _SLOW)
            yield pytest.param(
                wrap, feature, id=f"{wrap.__name__}-{feature}", marks=() if sampled else (pytest.mark.full,)
            )


@pytest.mark.parametrize(("wrap", "feature"), list(_cases()))
def test_a_wrapped_model_does_what_the_plain_one_does(wrap: Wrap, feature: str) -> None:
    wanted, found = _on_the_plain_model(feature), _run(_wrapped(wrap), feature)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (found[name] - value).abs().max() < 1e-4, name
        elif name in ("attention", "f1"):
            assert found[name] == pytest.approx(value, abs=1e-5), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("wrap", [adapter, patched, *(pytest.param(each, marks=pytest.mark.full) for each in COMPILED)])
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
    assert not unwrapped(model)._forward_hooks


@pytest.mark.parametrize("feature", ["eviction", "eviction at the end", "comparing", "batch"])
def test_adapters_of_older_peft(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.20, PEFT called the forward of the model inside past its hooks."""

    def forward(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.model.forward(*args, **kwargs)

    monkeypatch.setattr(peft.tuners.tuners_utils.BaseTuner, "forward", forward)
    test_a_wrapped_model_does_what_the_plain_one_does(causal_adapter, feature)


def _stance() -> str:
    # The only way to ask.
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.parametrize("wrap", [compiled_forward, compiled_in_place])
def test_a_compiled_model_is_compiled_again_when_the_last_block_ends(wrap: Wrap) -> None:
    model = _wrapped(wrap)
    first, second = uncompiled(model), uncompiled(model)
    assert _stance() == "default"
    first.__enter__()
    entering = threading.Thread(target=second.__enter__)
    entering.start()
    entering.join()
    # Not in the order in which they could be nested.
    first.__exit__(None, None, None)
    assert _stance() == "force_eager"
    second.__exit__(None, None, None)
    assert _stance() == "default"
    with uncompiled(tiny_model("llama")):
        assert _stance() == "default"


def test_a_forked_child_compiles_whatever_its_parents_threads_are_at() -> None:
    block = uncompiled(_wrapped(compiled_forward))
    entering = threading.Thread(target=block.__enter__)
    entering.start()
    entering.join()
    assert _stance() == "force_eager"
    child = os.fork()
    if child == 0:
        os._exit(0 if _stance() == "default" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _stance() == "force_eager"
    block.__exit__(None, None, None)
    assert _stance() == "default"


@pytest.mark.parametrize(
    ("adapter_config", "reason"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PromptTuningConfig, which puts"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PrefixTuningConfig, which puts"),
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


def test_an_adapter_that_is_only_loaded_is_not_refused() -> None:
    model = causal_adapter(tiny_model("llama"))
    model.add_adapter(
        "later", peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[5])
    )
    with BlendEngine(model, tiny_tokenizer(), **SETTINGS) as engine:
        assert engine.unsupported_reason is None


def test_an_adapter_cannot_be_chosen_by_call() -> None:
    model = adapter(tiny_model("llama"))
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with BlendEngine(model, tiny_tokenizer(), **SETTINGS) as engine, pytest.raises(ConfigError, match="adapter_name"):
        engine.generate(PROMPT, TOKENS, adapter_names=["other"])


def layer_by_layer(model: PreTrainedModel) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return _used(model)


@pytest.mark.parametrize(
    "compiled",
    [layer_by_layer, *(pytest.param(each, marks=pytest.mark.full) for each in (compiled_in_place, compiled_around))],
)
def test_a_compiled_model_is_blended_all_the_same(compiled: Callable[[PreTrainedModel], Any]) -> None:
    model = compiled(tiny_model("llama"))
    proof = prove(model)
    assert proof.is_exact, proof
    assert model_fingerprint(model) == model_fingerprint(tiny_model("llama"))
    torch.compiler.reset()


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
def test_a_patched_layer_is_caught(make_engine: MakeEngine, patch: Callable[[nn.Module], None], reason: str) -> None:
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
