"""Proving on a few random tokens that blending, and decoding in a padded batch, is exact on a model.

Each layer is handed the states that it had in the model's own run, so that no rounding is carried from layer to layer: what is
left is small in any dtype and under any quantisation, and a mistake is not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.steer import BlendCache, LayerSource, Steering
from cacheblend_rag.kv import LayerKV, shift_layer
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import CACHE, Decoder, KVCache, PaddedBatch, before_layers, refusing_failures
from cacheblend_rag.selection import Selection

__all__ = ["check_batching", "check_blending", "true_kv"]

_PROMPT_TOKENS = 24
_CHUNKS = (ChunkSpan(3, 11, 3), ChunkSpan(12, 20, 12))
_RECOMPUTED_ROWS = (4, 9, 12, 13, 19)
_STORED_TOKENS = 17
_DISTANCE = 11
# How far results may be off, of their scale: in float32, and where numbers are rounded to fewer bits on the way.
_EXACT, _ROUNDED = 1e-3, 1e-1
# What share of the rows that holds for where numbers are rounded, since a row may go to other experts for it; and of rows that
# stand elsewhere, of which each is rounded otherwise.
_MOST, _HALF = 0.85, 0.5


def true_kv(layers: Sequence[LayerKV]) -> LayerSource:
    """Return a source of copies of a whole prompt's own KV, over which any selection must give the model's own logits."""
    return lambda layer: LayerKV(*(tensor.clone() for tensor in layers[layer]))


@torch.no_grad()
def check_blending(decoder: Decoder) -> None:
    """Raise `UnsupportedModelError` if some rows over the model's own KV, or moved KV, differ from what the model computes."""
    with refusing_failures(type(decoder.model).__name__, "blended"):
        drawn, own = _random_ids(decoder, 1), KVCache(decoder.num_layers)
        ids = drawn.to(decoder.device)
        with _handing(decoder) as wanted:
            logits = _logits(decoder, own, input_ids=ids)
        _check_rows(decoder, drawn, own.kv(), [*wanted, logits])
        # KV that cannot be moved is checked where it is: some models do not count from 0 as they are told to (RoBERTa).
        _check_move(decoder, ids, own.kv(), wanted, _DISTANCE if decoder.is_movable else 0)


def _check_rows(decoder: Decoder, drawn: torch.Tensor, own: list[LayerKV], wanted: list[torch.Tensor]) -> None:
    """Check a prompt of which some rows are computed, and one that goes on after what is stored."""
    ids = drawn.to(decoder.device)
    layout = PromptLayout(tuple(drawn[0].tolist()), tuple(range(_PROMPT_TOKENS)), _CHUNKS)
    selected = torch.tensor(_RECOMPUTED_ROWS)
    blended, after = BlendCache(decoder.num_layers), KVCache(decoder.num_layers)
    some = _rows_of(decoder, wanted, torch.cat((layout.text_rows, selected)).sort().values)
    steering = Steering(decoder, blended, layout, Selection(selected), true_kv(own))
    with steering(), _handing(decoder, some) as given:
        logits = _logits(decoder, blended, input_ids=ids)
    _check_results(decoder, "computing some rows over the model's own KV", [*given, logits], some)
    after.expect(_STORED_TOKENS, len(own), true_kv(own))
    rest = _rows_of(decoder, wanted, torch.arange(_STORED_TOKENS, _PROMPT_TOKENS))
    with _handing(decoder, rest) as given:
        logits = _logits(decoder, after, input_ids=ids[:, _STORED_TOKENS:])
    _check_results(decoder, "continuing after the model's own KV", [*given, logits], rest)


def _check_move(
    decoder: Decoder, ids: torch.Tensor, own: list[LayerKV], wanted: list[torch.Tensor], distance: int
) -> None:
    """Check that KV which is moved is the KV computed there."""
    distances = torch.full((_PROMPT_TOKENS,), distance)
    with _handing(decoder, wanted) as given:
        moved = decoder.kv_at(ids, distance)
    tolerance = _tolerance(decoder)
    for layer, (here, there) in enumerate(zip(own, moved, strict=True)):
        turned = LayerKV(*(part.clone() for part in here))
        rotation = decoder.rotations[layer]
        if rotation is not None:
            shift_layer(turned, rotation.table(distances, turned.keys.device))
        difference = max(map(_kv_difference, turned, there))
        if not difference <= tolerance:
            off = f"(off by {difference:.2g} of its scale, {tolerance:.2g} allowed)"
            why = f"KV moved by {distance} positions is not the KV computed there {off}"
            if not distance:
                why = "with explicit positions from 0 on, it computes different KV than without"
            raise UnsupportedModelError(f"{type(decoder.model).__name__}, layer {layer}: {why}")
    _check_results(decoder, f"standing {distance} positions further on", given, wanted, _HALF)


@torch.no_grad()
def check_batching(decoder: Decoder) -> None:
    """Raise `UnsupportedModelError` if a prompt beside a longer one, padded on the left, goes on with other logits than alone."""
    with refusing_failures(type(decoder.model).__name__, "run in a padded batch"):
        ids = _random_ids(decoder, 2)
        prompts, newest = [ids[0, :-1].tolist(), ids[1, : _PROMPT_TOKENS // 2].tolist()], ids[:, -1:].to(decoder.device)
        batch = PaddedBatch(prompts, [range(len(prompt)) for prompt in prompts], room=1)
        alone: list[list[torch.Tensor]] = []
        for row, prompt in enumerate(prompts):
            own = KVCache(decoder.num_layers)
            tokens = torch.tensor([prompt], device=decoder.device)
            batch.take(row, own, _logits(decoder, own, input_ids=tokens)[0, -1])
            with _handing(decoder) as states:
                logits = _logits(decoder, own, input_ids=newest[row : row + 1])
            alone.append([*states, logits])
        wanted = [torch.cat(each, dim=-3) for each in zip(*alone, strict=True)]
        inputs, cache, _ = batch.filled(decoder.device)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=decoder.device)
        with _handing(decoder, wanted) as given:
            logits = _logits(decoder, cache, input_ids=newest, attention_mask=mask, position_ids=positions)
        _check_results(decoder, "decoding in a padded batch", [*given, logits], wanted)


def _logits(decoder: Decoder, cache: KVCache, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last row, ``(batch, 1, vocab)``."""
    logits: torch.Tensor = decoder.model(**inputs, **{CACHE: cache}, use_cache=True).logits[:, -1:]
    return logits


@contextmanager
def _handing(decoder: Decoder, wanted: Sequence[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
    """List the states that reach each layer with KV in a ``with`` block; their last rows become what is `wanted`."""
    given: list[torch.Tensor] = []
    axis, thread = _row_axis(decoder), threading.get_ident()

    def hand(number: int, arguments: dict[str, Any]) -> dict[str, Any] | None:
        # The model may be in use elsewhere, without an engine.
        if threading.get_ident() != thread:
            return None
        states = arguments[decoder.states].clone()
        if wanted is None:
            given.append(states)
            return None
        # A model that counts for itself is given padding before them, of which anything may have come.
        count = wanted[number].shape[axis]
        last = states.narrow(axis, states.shape[axis] - count, count)
        given.append(last.clone())
        # What reaches the first layer is embedded, and nothing is carried over yet.
        if number:
            states.zero_()
            last.copy_(wanted[number])
        return arguments | {decoder.states: states}

    with before_layers(decoder.layers[: decoder.num_kv_layers], hand):
        yield given


def _rows_of(decoder: Decoder, results: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """Return some rows of the states of each layer, and the logits as they are."""
    *states, logits = results
    return [*(each.index_select(_row_axis(decoder), rows.to(each.device)) for each in states), logits]


def _row_axis(decoder: Decoder) -> int:
    axis = decoder.row_axes[decoder.states]
    assert axis is not None
    return axis


def _check_results(
    decoder: Decoder, what: str, results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], share: float = _MOST
) -> None:
    """Check the states that reach each layer with KV, and the logits, if these come after them."""
    tolerance = _tolerance(decoder)
    share = 1.0 if tolerance == _EXACT else share
    for number, (result, own) in enumerate(zip(results, wanted, strict=True)):
        is_logits = number == decoder.num_kv_layers
        # Of states it counts what the layer has added to them, which may be a small part.
        before = torch.zeros_like(own) if is_logits or not number else wanted[number - 1]
        apart, scale = (_norms(own.float() - each.float()) for each in (result, before))
        difference = float((apart / scale.clamp_min(torch.finfo(torch.float32).tiny)).quantile(share))
        if not difference <= tolerance:
            which = "logits" if is_logits else f"states before layer {number}"
            raise UnsupportedModelError(
                f"{type(decoder.model).__name__}: {what} gives different {which} than the model itself (off by "
                f"{difference:.2g} of their scale, {tolerance:.2g} allowed); something in its forward depends on more than "
                "the rows and their KV"
            )


def _norms(states: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row, ``(batch, rows)``; the states of some have another axis before the batch."""
    return states.float().square().sum(dim=-1).reshape(-1, *states.shape[-3:-1]).sum(dim=0).sqrt()


def _kv_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return how far apart KV is in the worst channel of a head, over its scale: some are a hundred times as large as others."""
    apart, scale = (each.float().square().sum(dim=(0, 2)).sqrt() for each in (a.float() - b.float(), b))
    return float((apart / scale.clamp_min(torch.finfo(torch.float32).tiny)).max())


def _random_ids(decoder: Decoder, rows: int) -> torch.Tensor:
    vocabulary = decoder.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (rows, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))


def _tolerance(decoder: Decoder) -> float:
    """Return how far results may be off, by the types of the weights: not all that quantise say so in the configuration."""
    quantised = getattr(decoder.model.config, "quantization_config", None) is not None or not all(
        type(each) is torch.nn.Parameter and each.is_floating_point() for each in decoder.model.parameters()
    )
    return _ROUNDED if quantised or decoder.model.dtype != torch.float32 else _EXACT
