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

from cacheblend_attachments import Repair, SnapKV, SourceAttention
from cacheblend_lab.families import prove
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.model import model_fingerprint, uncompiled, watch_forward
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.limits import apart

# "eager" has dynamo trace and guard, which is where hooks are lost, and leaves out the slow generation of code.
BACKEND = "eager"
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


def adapter_of_older_peft(model: PreTrainedModel) -> Any:
    """Up to 0.20, PEFT called the forward of the model inside past its hooks."""
    adapted = causal_adapter(model)
    adapted.base_model.forward = lambda *args, **kwargs: model.forward(*args, **kwargs)
    return adapted


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


def adapter_on_compiled(model: PreTrainedModel) -> Any:
    return _used(adapter(compiled_in_place(model)))


def layer_by_layer(model: PreTrainedModel) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return _used(model)


def _used(model: Any) -> Any:
    """Have it compiled for any length before hooks come."""
    with torch.no_grad():
        for length in (37, 41):
            model(input_ids=torch.arange(3, 3 + length)[None])
    return model


COMPILED = [compiled_around, compiled_in_place, compiled_forward, adapter_on_compiled]
WRAPS = [adapter, causal_adapter, adapter_of_older_peft, patched, *COMPILED]
# Each is sampled by one that is compiled; the others are of the full counts.
EVERY_WRAP = [
    pytest.param(wrap, marks=pytest.mark.full) if wrap in COMPILED and wrap is not compiled_in_place else wrap
    for wrap in WRAPS
]


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
    "eviction": (lambda engine: _answer(engine, SnapKV(0.25), selector="query"), "evicted"),
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


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("wrap", EVERY_WRAP)
def test_a_wrapped_model_does_what_the_plain_one_does(wrap: Wrap, feature: str) -> None:
    wanted, found = _on_the_plain_model(feature), _run(_wrapped(wrap), feature)
    assert found.pop("attention", None) == pytest.approx(wanted.get("attention"), abs=1e-5)
    assert found == {name: value for name, value in wanted.items() if name != "attention"}


@pytest.mark.parametrize("wrap", [adapter, *EVERY_WRAP[3:]])
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


def test_a_compiled_model_is_compiled_again_when_the_last_block_ends() -> None:
    told = torch.compile(lambda tensor: tensor + int(torch.compiler.is_compiling()), backend=BACKEND)

    def compiles() -> bool:
        return bool(told(torch.zeros(1)).item())

    def in_a_thread(work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    model = _wrapped(compiled_in_place)
    assert compiles()
    first, second = uncompiled(model), uncompiled(model)
    first.__enter__()
    in_a_thread(second.__enter__)
    # Not in the order in which they could be nested.
    first.__exit__(None, None, None)
    assert not compiles()
    # A forked child has none of its parent's threads, and so of their blocks.
    assert os.waitpid(apart(lambda: compiles() or os._exit(1)), 0)[1] == 0
    assert not compiles()
    second.__exit__(None, None, None)
    assert compiles()
    with uncompiled(tiny_model("llama")):
        assert compiles()


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


def test_an_adapter_that_is_only_loaded_is_not_refused_and_none_is_chosen_by_call() -> None:
    model = causal_adapter(tiny_model("llama"))
    model.add_adapter(
        "later", peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[5])
    )
    with BlendEngine(model, tiny_tokenizer(), **SETTINGS) as engine:
        assert engine.unsupported_reason is None
        with pytest.raises(ConfigError, match="adapter_name"):
            engine.generate(PROMPT, TOKENS, adapter_names=["later"])


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


@pytest.mark.parametrize("patch", [mixes_rows, knows_the_position, fails_on_some_rows])
def test_a_patched_layer_is_caught(make_engine: MakeEngine, patch: Callable[[nn.Module], None]) -> None:
    model = tiny_model("llama")
    patch(model.model.layers[3])
    # What the check is for: the inspection alone does not see it.
    assert make_engine(model=model, self_check=False, strict=True).unsupported_reason is None
    with pytest.raises(UnsupportedModelError):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True))
    engine = make_engine(model=model)
    engine.add([Chunk(words(20, 1), "n")])
    prompt = BlendPrompt(words(4, 2), ["n"], words(5, 3))
    result = engine.prefill(prompt)
    assert result.report.fallback_reason == engine.unsupported_reason is not None
    own = model(input_ids=torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]
    assert (result.logits - own).abs().max() < 1e-5
