"""Several engines on one model: they take turns, and what one has put on the model leaves the calls of others alone."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import inspect_model
from cacheblend_rag.selection import FixedSelection
from tests.core.dense import own_kv, random_ids, span_layout
from tests.engines import busy
from tests.families import tiny_model, tiny_tokenizer, words

SETTINGS = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15)
PROMPT = BlendPrompt(words(4, 50), [Chunk(words(20, seed), f"n{seed}") for seed in range(3)], words(6, 51))


def _make(model: PreTrainedModel, **settings: Any) -> BlendEngine:
    return BlendEngine(model, tiny_tokenizer(), **engine_settings(SETTINGS, **settings))


def _during(module: torch.nn.Module, call: Callable[[], Any]) -> list[Any]:
    """Have `call` made once, in a thread of its own, at every outer call of a module, and note what it returns."""
    found: list[Any] = []
    busy = threading.Lock()

    def before(*_: Any) -> None:
        if busy.acquire(blocking=False):
            thread = threading.Thread(target=lambda: found.append(call()))
            thread.start()
            thread.join()
            busy.release()

    module.register_forward_pre_hook(before)
    return found


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_engines_on_one_model_have_one_turn() -> None:
    model = tiny_model("llama")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    around = [model, torch.compile(model, backend="eager"), lora, torch.compile(lora, backend="eager")]
    assert {scheduler_of(each) for each in around} == {scheduler_of(model)}
    assert scheduler_of(tiny_model("llama")) is not scheduler_of(model)


def test_engines_on_one_model_wait_for_each_other() -> None:
    model = tiny_model("llama")
    with _make(model) as first, _make(model) as second:
        wanted = first.generate(PROMPT, 6).token_ids
        found: list[tuple[int, ...]] = []
        asking = threading.Thread(target=lambda: found.append(second.generate(PROMPT, 6).token_ids))
        making = threading.Thread(target=lambda: _make(model).close())
        for thread in (asking, making):
            with busy(first) as until:
                thread.start()
                until(1)
            thread.join(60)
        assert found == [wanted]


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def test_inspection_sees_its_own_calls_only_and_changes_no_others() -> None:
    alone, model = inspect_model(tiny_model("llama")), tiny_model("llama")
    ids = torch.arange(3, 33)[None]
    wanted = _logits(model, ids)
    outputs = [_during(model.model.layers[n].mlp, lambda: _logits(model, ids)) for n in (0, alone.num_layers - 1)]
    beside = inspect_model(model)
    assert beside.row_axes == alone.row_axes
    assert beside.restores_rows == alone.restores_rows
    assert (beside.row_flops, beside.probe_share) == (alone.row_flops, alone.probe_share)
    for each in outputs:
        assert each
        assert all(output.equal(wanted) for output in each)


@torch.no_grad()
def test_rows_are_put_back_in_the_blended_prompt_only() -> None:
    model = tiny_model("llama")
    # As for a model that takes all rows behind its layers.
    decoder = replace(inspect_model(model), restores_rows=True)
    ids, others = random_ids(1), torch.arange(3, 33)[None]
    wanted, others_wanted = _logits(model, torch.tensor([ids])), _logits(model, others)
    source = true_kv([LayerKV(*kv) for kv in own_kv(model, ids)])
    outputs = _during(model.model.layers[-1].mlp, lambda: _logits(model, others))
    cache = BlendCache(decoder.num_layers)
    with Steering(decoder, cache, span_layout(ids), FixedSelection(torch.tensor([6, 30])), source)():
        logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    assert logits.shape == wanted.shape
    assert (logits[0, -1] - wanted[0, -1]).abs().max() < 1e-4
    [output] = outputs
    assert output.equal(others_wanted)
