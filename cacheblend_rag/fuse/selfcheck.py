"""Proving on a few random tokens that blending, and decoding in a padded batch, is exact on a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.steer import BlendCache, LayerSource, Steering
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import Decoder, KVCache, PaddedBatch, refusing_failures
from cacheblend_rag.rope import shift_layer
from cacheblend_rag.selection import FixedSelection

__all__ = ["check_batching", "check_blending", "true_kv"]

_PROMPT_TOKENS = 24
_CHUNKS = (ChunkSpan(3, 11, 3), ChunkSpan(12, 20, 12))
_RECOMPUTED_ROWS = (4, 9, 12, 13, 19)
_STORED_TOKENS = 17
_DISTANCE = 11
# How far results may be off, of their scale: in float32, in what has fewer bits, and where these are quantised, at most.
_EXACT, _ROUNDED, _MOST = 1e-3, 1e-1, 0.5


def true_kv(layers: Sequence[LayerKV]) -> LayerSource:
    """Return a source of copies of a whole prompt's own KV, over which any selection must give the model's own logits."""
    return lambda layer: LayerKV(*(tensor.clone() for tensor in layers[layer]))


@torch.no_grad()
def check_blending(decoder: Decoder) -> None:
    """Raise `UnsupportedModelError` if some rows over the model's own KV, or moved KV, differ from what the model computes."""
    name = type(decoder.model).__name__
    with refusing_failures(name, "blended"):
        drawn, tolerances = _random_ids(decoder, 1), _tolerances(decoder)
        own = _check_rows(decoder, name, drawn, tolerances[0])
        # KV that cannot be moved is checked where it is: some models do not count from 0 as they are told to (RoBERTa).
        _check_move(decoder, drawn, own, _DISTANCE if decoder.is_movable else 0, tolerances[1:])


def _check_rows(decoder: Decoder, name: str, drawn: torch.Tensor, tolerance: float) -> list[LayerKV]:
    """Check a prompt of which some rows are selected; return the model's own KV of it."""
    ids = drawn.to(decoder.device)
    own = KVCache(decoder.num_layers)
    wanted = decoder.model(input_ids=ids, past_key_values=own, use_cache=True).logits[0, -1]
    layout = PromptLayout(tuple(drawn[0].tolist()), tuple(range(_PROMPT_TOKENS)), _CHUNKS)
    cache = BlendCache(decoder.num_layers)
    steering = Steering(decoder, cache, layout, FixedSelection(torch.tensor(_RECOMPUTED_ROWS)), true_kv(own.kv()))
    with steering():
        blended = decoder.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
    _check_logits(name, "computing some rows over the model's own KV", blended, wanted, tolerance)
    stored, after = own.kv(), KVCache(decoder.num_layers)
    after.expect(_STORED_TOKENS, len(stored), true_kv(stored))
    going_on = decoder.model(input_ids=ids[:, _STORED_TOKENS:], past_key_values=after, use_cache=True).logits[0, -1]
    _check_logits(name, "continuing after the model's own KV", going_on, wanted, tolerance)
    return stored


def _check_logits(name: str, what: str, logits: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    difference = _relative(logits, wanted)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name}: {what} gives different logits than the model itself (off by {difference:.2g} of their scale, "
            f"{tolerance:.2g} allowed); something in its forward depends on more than the rows and their KV"
        )


def _check_move(
    decoder: Decoder, drawn: torch.Tensor, own: list[LayerKV], distance: int, tolerances: list[float]
) -> None:
    """Check that KV which is moved is the KV computed there."""
    distances = torch.full((_PROMPT_TOKENS,), distance)
    moved = decoder.kv_at(drawn.to(decoder.device), distance)
    for layer, (here, there, tolerance) in enumerate(zip(own, moved, tolerances, strict=True)):
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


@torch.no_grad()
def check_batching(decoder: Decoder) -> None:
    """Raise `UnsupportedModelError` if a prompt beside a longer one, padded on the left, goes on with other logits than alone."""
    name = type(decoder.model).__name__
    with refusing_failures(name, "run in a padded batch"):
        model, ids = decoder.model, _random_ids(decoder, 2)
        prompts, newest = [ids[0, :-1].tolist(), ids[1, : _PROMPT_TOKENS // 2].tolist()], ids[:, -1:].to(decoder.device)
        batch = PaddedBatch(prompts, [range(len(prompt)) for prompt in prompts], room=1)
        wanted = []
        for row, prompt in enumerate(prompts):
            own = KVCache(decoder.num_layers)
            tokens = torch.tensor([prompt], device=decoder.device)
            batch.take(row, own, model(input_ids=tokens, past_key_values=own, use_cache=True).logits[0, -1])
            wanted.append(model(input_ids=newest[row : row + 1], past_key_values=own, use_cache=True).logits[0, -1])
        inputs = batch.inputs(decoder.device)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=decoder.device)
        with batch.prefilled(model) as cache:
            model(**inputs, past_key_values=cache, use_cache=True)
            logits = model(
                input_ids=newest, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits[:, -1]
        tolerance = _tolerances(decoder)[0]
        for alone, beside in zip(wanted, logits, strict=True):
            _check_logits(name, "decoding in a padded batch", beside, alone, tolerance)


def _random_ids(decoder: Decoder, rows: int) -> torch.Tensor:
    vocabulary = decoder.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (rows, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))


def _tolerances(decoder: Decoder) -> list[float]:
    """Return how far logits, and the KV of each layer, may be off: on quantised weights, twice the noise of their kernels."""
    usual = _EXACT if decoder.model.dtype == torch.float32 else _ROUNDED
    # Not all that quantise say so in the configuration; the types of their weights do.
    if getattr(decoder.model.config, "quantization_config", None) is None and all(
        type(each) is torch.nn.Parameter and each.is_floating_point() for each in decoder.model.parameters()
    ):
        return [usual] * (1 + decoder.num_kv_layers)
    return [min(max(usual, 2 * noise), _MOST) for noise in _noise(decoder)]


def _noise(decoder: Decoder) -> list[float]:
    """Return how much logits, and the KV of each layer, differ when the prompt runs beside another one, a last bit off."""
    ids, generator = _random_ids(decoder, 2).to(decoder.device), torch.Generator().manual_seed(0)
    # In float32 so little that, without quantisation, all that comes of it is below what is allowed.
    jitter = max(1e-5, torch.finfo(decoder.model.dtype).eps)

    def run(rows: int) -> list[tuple[torch.Tensor, ...]]:
        cache = KVCache(decoder.num_layers)
        logits = decoder.model(input_ids=ids[:rows], past_key_values=cache, use_cache=True).logits[:1, None]
        return [logits.split(1, dim=2), *((keys[:1], values[:1]) for keys, values in cache.kv())]

    # Kernels that round their inputs repeat themselves on equal inputs, and diverge once a last bit differs.
    alone, embedding = run(1), decoder.model.get_input_embeddings()
    with embedding.register_forward_hook(
        lambda _module, _args, states: states * (1 + jitter * torch.randn(states.shape, generator=generator).to(states))
    ):
        return [max(map(_kv_difference, *parts)) for parts in zip(run(2), alone, strict=True)]


def _kv_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return how far KV is apart over the scale of `b`; in half precision the median token, as rounding may change experts."""
    if b.dtype == torch.float32:
        return _relative(a, b)
    apart = (a.float() - b.float()).square().sum(dim=(0, 1, 3))
    return float(
        (apart / b.float().square().sum(dim=(0, 1, 3)).clamp_min(torch.finfo(torch.float32).tiny)).sqrt().median()
    )


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference over that of `b`: single outliers of half precision do not decide it."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(torch.finfo(torch.float32).tiny))
