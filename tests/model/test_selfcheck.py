"""The check of a new engine, in every dtype: keys with outliers are no reason to refuse a model, and what breaks one is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cacheblend_lab.families import tiny_config, tiny_model, with_outliers
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse import selfcheck
from cacheblend_rag.kv import Rotation
from cacheblend_rag.model import Decoder, inspect_model
from tests.engines import MakeEngine
from tests.families import tiny_tokenizer, words

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS: dict[Any, Any] = {"half": "interleaved", "interleaved": "half"}
PARTS: dict[Any, Any] = {"keys": "values", "values": "keys"}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return inspect_model(with_outliers(tiny_model(tiny_config("qwen2"))).to(request.param))


def test_keys_with_outliers_turn_as_all_do(decoder: Decoder) -> None:
    first = decoder.rotations[0]
    for rotation in decoder.rotations:
        assert first is not None and rotation is not None
        assert (rotation.layout, rotation.part) == ("half", "keys")
        torch.testing.assert_close(rotation.inv_freq, first.inv_freq)
    selfcheck.check_blending(decoder)
    selfcheck.check_batching(decoder)


TURNS: dict[str, Callable[[Rotation], Rotation | None]] = {
    "layout": lambda rotation: Rotation(rotation.inv_freq, LAYOUTS[rotation.layout], rotation.part),
    "part": lambda rotation: Rotation(rotation.inv_freq, rotation.layout, PARTS[rotation.part]),
    "frequencies": lambda rotation: Rotation(rotation.inv_freq * 1.05, rotation.layout, rotation.part),
    "direction": lambda rotation: Rotation(-rotation.inv_freq, rotation.layout, rotation.part),
    "not at all": lambda rotation: None,
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("layers", [slice(None), slice(-1, None)], ids=["all", "last"])
def test_keys_that_are_turned_otherwise_are_refused(decoder: Decoder, turn: str, layers: slice) -> None:
    rotations = list(decoder.rotations)
    rotations[layers] = [TURNS[turn](rotation) for rotation in rotations[layers] if rotation is not None]
    with pytest.raises(UnsupportedModelError, match="moved"):
        selfcheck.check_blending(replace(decoder, rotations=tuple(rotations)))


@contextmanager
def elsewhere(decoder: Decoder) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        kv_at = Decoder.kv_at
        patch.setattr(Decoder, "kv_at", lambda self, ids, position: kv_at(self, ids, position + 1))
        yield


@contextmanager
def layer_hook(change: Callable[[torch.Tensor], torch.Tensor], decoder: Decoder) -> Iterator[None]:
    def after(module: Any, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    hook = decoder.layers[2].register_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


def with_the_next(states: torch.Tensor) -> torch.Tensor:
    return states + 0.5 * states.roll(-1, dims=1)


def fails(states: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a layer of the user's own")


BREAKS: dict[str, Callable[[Decoder], AbstractContextManager[None]]] = {
    "positions": elsewhere,
    "sees what follows": partial(layer_hook, with_the_next),
    "fails": partial(layer_hook, fails),
    "not a number": partial(layer_hook, lambda states: states * torch.nan),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_model_that_is_broken_is_refused(decoder: Decoder, broken: str) -> None:
    with BREAKS[broken](decoder), pytest.raises(UnsupportedModelError):
        selfcheck.check_blending(decoder)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_model_in_half_precision_that_cannot_be_moved_answers_in_full(
    make_engine: MakeEngine, dtype: torch.dtype
) -> None:
    model = tiny_model(tiny_config("qwen2"), dtype=dtype)
    with layer_hook(with_the_next, inspect_model(model)):
        engine = make_engine(model=model, self_check=True)
        assert engine.unsupported_reason is not None
        engine.add([Chunk(words(20, 1), "n")])
        report = engine.prefill(BlendPrompt(words(3, 2), ["n"], words(4, 3))).report
        assert report.fallback_reason == engine.unsupported_reason
        with pytest.raises(UnsupportedModelError):
            BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True, self_check=True))
