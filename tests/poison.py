"""Requests that harm nobody but their caller: what is asked with them, and how callers ask for it at the same time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from cacheblend_rag import BlendPrompt, Chunk

BEYOND = "[BEYOND]"
"""A word that the tokenizer has a token of, and the model no embedding."""

TEXTS = {
    "a token beyond the model": f"What does {BEYOND} mean?",
    "half a character": "What is \ud83d?",
    "a text beyond the window": "What? " * 5000,
}
"""Questions, and words of documents, that no model here can be asked."""

COUNTS = pytest.mark.parametrize("count", [48, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
"""How many are asked at the same time, one in eight of them poisoned."""


class Failing(StoppingCriteria):
    """A criterion that fails at once; answers with it are decoded together with others."""

    is_of_one_answer = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a caller's own")


class Refusing(LogitsProcessor):
    """A processor that fails at once."""

    is_of_one_answer = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("a caller's own")


class Reshaping(LogitsProcessor):
    """A processor that returns scores of no token."""

    is_of_one_answer = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :0]


def spare_token(tokenizer: Any) -> Any:
    """Give a tokenizer the word `BEYOND`, of which its model knows nothing."""
    tokenizer.add_tokens([BEYOND])
    return tokenizer


@contextmanager
def failing_on(model: PreTrainedModel, token: int) -> Iterator[None]:
    """Have a model fail on whatever it reads that holds a token, as it does where memory ends."""

    def fail(module: Any, args: Any) -> None:
        if args[0].shape[1] > 1 and bool((args[0] == token).any()):
            raise torch.OutOfMemoryError("the device has no room for this one")

    hook = model.get_input_embeddings().register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def prompts(size: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return prompts, and options of ``generate``, for a model of `size` tokens; none is answered."""
    fine = BlendPrompt("t5", [Chunk("t3 t4")], "t6")
    asked: dict[str, tuple[Any, dict[str, Any]]] = {name: (BlendPrompt(text), {}) for name, text in TEXTS.items()}
    asked |= {f"{name}, in a chunk": (BlendPrompt("t5", [Chunk(text)], "t6"), {}) for name, text in TEXTS.items()}
    return asked | {
        "ids beyond the model": (BlendPrompt(segments=[[1, size], "t6"]), {}),
        "negative ids": (BlendPrompt(segments=[[-1], "t6"]), {}),
        "ids of a chunk": (BlendPrompt("t5", [Chunk("t3", token_ids=[size])], "t6"), {}),
        "nothing": (BlendPrompt(""), {}),
        "no prompt": ("t5", {}),
        "an unknown chunk": (BlendPrompt("t5", ["nowhere"], "t6"), {}),
        "a place beyond the window": (BlendPrompt(segments=["t5"], positions=[10**6]), {}),
        "a criterion that fails": (fine, {"stopping_criteria": [Failing()]}),
        "a processor that fails": (fine, {"logits_processor": [Refusing()]}),
        "a processor that returns no scores": (fine, {"logits_processor": [Reshaping()]}),
        "an unknown option": (fine, {"tempreature": 1}),
    }


def outcomes(calls: Sequence[Callable[[], Any]], callers: int = 16) -> list[Any]:
    """Return what became of calls that come at the same time: what each returned, or its error."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(outcome, calls))
