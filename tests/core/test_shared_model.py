"""Several engines on one model: they take turns, and what one has put on the model leaves the calls of others alone."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from tests.engines import busy
from tests.families import tiny_model, tiny_tokenizer, words

SETTINGS = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15)
PROMPT = BlendPrompt(words(4, 50), [Chunk(words(20, seed), f"n{seed}") for seed in range(3)], words(6, 51))


def make(model: Any) -> BlendEngine:
    return BlendEngine(model, tiny_tokenizer(), **SETTINGS)


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("wrapper", ["none", "lora"])
def test_engines_on_one_model_wait_for_each_other(wrapper: str) -> None:
    model: Any = tiny_model("llama")
    around = model
    if wrapper == "lora":
        around = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with make(model) as first, make(around) as second:
        wanted = first.generate(PROMPT, 6).token_ids
        found: list[tuple[int, ...]] = []
        asking = threading.Thread(target=lambda: found.append(second.generate(PROMPT, 6).token_ids))
        making = threading.Thread(target=lambda: make(model).close())
        for thread in (asking, making):
            with busy(first) as until:
                thread.start()
                until(1)
            thread.join(60)
        assert found == [wanted]


def during(module: torch.nn.Module, call: Callable[[], Any]) -> list[Any]:
    """Have `call` made once, in a thread of its own, at every outer call of a module, and note what it returns."""
    found: list[Any] = []
    begun = threading.Lock()

    def before(*_: Any) -> None:
        if begun.acquire(blocking=False):
            thread = threading.Thread(target=lambda: found.append(call()))
            thread.start()
            thread.join()
            begun.release()

    module.register_forward_pre_hook(before)
    return found


@torch.no_grad()
def test_calls_in_the_midst_of_a_prompt_see_and_change_nothing() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 33)[None]
    with make(tiny_model("llama")) as alone:
        wanted = [alone.prefill(PROMPT).logits for _ in range(2)]
    others_wanted = model(input_ids=ids).logits
    layers = model.get_decoder().layers
    outputs = [during(layers[number].mlp, lambda: model(input_ids=ids).logits) for number in (0, -1)]
    # It is looked at while others call it, too.
    with make(model) as engine:
        found = [engine.prefill(PROMPT).logits for _ in range(2)]
    assert all(map(torch.equal, found, wanted))
    for each in outputs:
        assert each and all(output.equal(others_wanted) for output in each)


@pytest.mark.skipif(sys.platform != "linux", reason="only GNU's OpenMP on Linux is slowed by them")
def test_the_workers_that_embedded_a_question_end_when_it_is_asked() -> None:
    with make(tiny_model("llama")) as engine, torch_threads(2):
        torch.ones(512, 512) @ torch.ones(512, 512)
        workers = len(os.listdir("/proc/self/task"))
        engine.begin_request(PROMPT)
        assert len(os.listdir("/proc/self/task")) < workers


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
