"""What each head keeps, and decoding on it, against naive references on every family."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, PreTrainedModel

from cacheblend_attachments.snapkv import Eviction, SnapKV, choose_tokens, context_attention
from cacheblend_rag.engine.attachment import RunningForward
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import AttentionCall, inspect_model, watch_attention
from cacheblend_rag.selection import FixedSelection
from tests.core.dense import RecordingCache, own_kv
from tests.families import CASES, tiny_model

TOLERANCE = 1e-4
SPANS = ((5, 25), (25, 47), (50, 70))
CONTEXT = (5, 70)
LENGTH = 78
CAPACITY, WINDOW, KERNEL = 17, 4, 3
STEPS = 8
SLIDING = {"mistral": range(6), "starcoder2": range(6), "gemma2": (0, 2, 4), "gemma3": (0, 1, 3, 4)}


@torch.no_grad()
def kept_rows(
    model: PreTrainedModel, ids: Sequence[int], context: tuple[int, int], capacity: int, window: int, kernel: int
) -> list[torch.Tensor]:
    """Return which rows each key head of each layer keeps, from the weights that eager attention hands out.

    Rows are ``(num_kv_heads, kept)``, ascending.
    """
    start, stop = context
    output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    kv_heads = [keys.shape[1] for keys in _keys(model, ids)]
    layers: list[torch.Tensor] = []
    for weights, heads in zip(output.attentions, kv_heads, strict=True):
        group = weights.shape[1] // heads
        chosen = []
        for head in range(heads):
            own = [
                float(weights[0, head * group :][:group, len(ids) - window :, row].sum()) for row in range(start, stop)
            ]
            chosen.append(naive_choice(own, capacity, kernel))
        rows = [[*range(start), *(start + token for token in kept), *range(stop, len(ids))] for kept in chosen]
        layers.append(torch.tensor(rows))
    return layers


def naive_choice(own: Sequence[float], capacity: int, kernel: int) -> list[int]:
    """Return the tokens kept of those with this attention: by the pooled, then by their own, then the earlier."""
    reach = kernel // 2
    pooled = [max(own[max(0, token - reach) : token + reach + 1]) for token in range(len(own))]
    return sorted(sorted(range(len(own)), key=lambda token: (-pooled[token], -own[token], token))[:capacity])


def _keys(model: PreTrainedModel, ids: Sequence[int]) -> list[torch.Tensor]:
    cache = RecordingCache()
    model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


@contextmanager
def hidden_columns(kept: dict[int, torch.Tensor], prompt_tokens: int) -> Iterator[None]:
    """Have eager attention of single rows hide from each key head the prompt's tokens that it did not keep."""
    original = AttentionInterface.get_interface

    def get_interface(
        table: AttentionInterface, implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        function = original(table, implementation, default)

        def masked(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] == 1 and module.layer_idx in kept:
                rows = kept[module.layer_idx]
                hidden = torch.zeros(rows.shape[0], key.shape[2])
                hidden[:, :prompt_tokens] = -torch.inf
                hidden.scatter_(1, rows, 0.0)
                groups = query.shape[1] // rows.shape[0]
                hidden = hidden.repeat_interleave(groups, dim=0)[None, :, None]
                mask = hidden if mask is None else mask + hidden
            return function(module, query, key, value, mask, *args, **kwargs)

        return masked

    AttentionInterface.get_interface = get_interface  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]


@torch.no_grad()
def dense_decode(
    model: PreTrainedModel,
    ids: Sequence[int],
    kept: dict[int, torch.Tensor],
    steps: int,
    positions: Sequence[int] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Decode greedily on a cache that holds everything, each key head seeing what it `kept`; return tokens and their logits."""
    cache = RecordingCache()
    places = list(range(len(ids)) if positions is None else positions)
    tokens, logits = list(ids), []
    fed, at = tokens, places
    for _ in range(steps):
        with hidden_columns(kept, len(ids)):
            inputs = {"input_ids": torch.tensor([fed]), "position_ids": torch.tensor([at])}
            output = model(**inputs, past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -1])
        fed, at = [int(logits[-1].argmax())], [at[-1] + 1]
        tokens = [*tokens, *fed]
    return tokens[len(ids) :], torch.stack(logits)


def _ids(seed: int) -> list[int]:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def _eviction(model: PreTrainedModel, cache: BlendCache, capacity: float = CAPACITY, room: int = 4) -> Eviction:
    decoder = SimpleNamespace(model=model)
    prompt = SimpleNamespace(layout=range(LENGTH), context=CONTEXT)
    run = SimpleNamespace(plan=None, prompt=prompt)
    asked = SnapKV(capacity, observation_window=WINDOW, pooling_kernel=KERNEL)
    return Eviction(asked, RunningForward(run, decoder, cache, None, STEPS, room))  # type: ignore[arg-type]


def _generate(
    model: PreTrainedModel, cache: BlendCache, ids: list[int], positions: list[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    inputs = torch.tensor([ids])
    output = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=cache,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **({} if positions is None else {"position_ids": torch.tensor([positions])}),
    )
    return output.sequences[0, LENGTH:].tolist(), torch.cat(output.logits)


def _is_same_as_dense(got: tuple[list[int], torch.Tensor], wanted: tuple[list[int], torch.Tensor]) -> None:
    # generate may not choose the end token before the last step; the reference may, and is compared up to there.
    tokens, logits = wanted
    count = next((step + 1 for step in range(STEPS) if got[0][step] != tokens[step]), STEPS)
    assert count == STEPS or tokens[count - 1] == 2
    assert (got[1][:count] - logits[:count]).abs().max() < TOLERANCE


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize(("family", "attention"), CASES)
@torch.no_grad()
def test_each_head_keeps_what_eager_weights_say_and_decodes_with_the_rest_masked(
    family: str, attention: str, blended: bool
) -> None:
    """Blended is over the model's own KV, with a few rows recomputed."""
    model, eager = tiny_model(family, attention), tiny_model(family, "eager")
    ids = _ids(1)
    rows = kept_rows(eager, ids, CONTEXT, CAPACITY, WINDOW, KERNEL)
    whole = SLIDING.get(family, ())
    own = [LayerKV(*kv) for kv in own_kv(model, ids)]
    layout = PromptLayout(tuple(ids), tuple(range(LENGTH)), tuple(ChunkSpan(a, b, a) for a, b in SPANS))
    cache = BlendCache(len(rows))
    eviction = _eviction(model, cache)
    selection = FixedSelection(torch.tensor([6, 11, 12, 33, 46, 69]))
    steering = Steering(inspect_model(model), cache, layout, selection, true_kv(own))
    with steering() if blended else nullcontext(), eviction():
        got = _generate(model, cache, ids)
    for layer, ((keys, values), wanted) in enumerate(zip(own, rows, strict=True)):
        held = cache.kv_layers[layer]
        if layer in whole:
            wanted = torch.arange(LENGTH).expand(keys.shape[1], -1)
        assert held.evicted_tokens == LENGTH - wanted.shape[1]
        assert held.get_seq_length() == LENGTH + STEPS - 1
        index = wanted[None, :, :, None].expand(-1, -1, -1, keys.shape[3])
        for mine, own in zip(cache.kv()[layer], (keys, values), strict=True):
            assert (mine[:, :, : wanted.shape[1]] - own.gather(2, index)).abs().max() < TOLERANCE
    assert eviction.evicted_tokens == (0 if len(whole) == 6 else 65 - CAPACITY)
    assert (eviction.kept_reason is None) == (len(whole) == 0)
    kept = {layer: each for layer, each in enumerate(rows) if layer not in whole}
    _is_same_as_dense(got, dense_decode(eager, ids, kept, STEPS))


def test_another_prompt_on_the_same_model_is_left_alone_and_ends_nothing() -> None:
    model = tiny_model("llama")
    ids, others = _ids(4), _ids(5)
    wanted = BlendCache(6)
    with _eviction(model, wanted)():
        alone = _generate(model, wanted, ids)
    cache, other = BlendCache(6), BlendCache(6)
    with _eviction(model, cache)():
        beside = _generate(model, other, others)
        got = _generate(model, cache, ids)
    assert torch.equal(got[1], alone[1])
    assert [layer.evicted_tokens for layer in cache.kv_layers] == [65 - CAPACITY] * 6
    assert not any(layer.evicted_tokens for layer in other.kv_layers)
    assert torch.equal(beside[1], _generate(model, BlendCache(6), others)[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_that_holds_prompt_and_answer_evicts_like_full_attention(attention: str) -> None:
    for family in ("mistral", "gemma3"):
        model, eager = tiny_model(family, attention), tiny_model(family, "eager")
        for each in (model, eager):
            each.config.sliding_window = LENGTH + STEPS
        ids = _ids(3)
        rows = kept_rows(eager, ids, CONTEXT, CAPACITY, WINDOW, KERNEL)
        cache = BlendCache(len(rows))
        eviction = _eviction(model, cache)
        with eviction():
            got = _generate(model, cache, ids)
        assert eviction.kept_reason is None
        assert {layer.evicted_tokens for layer in cache.kv_layers} == {65 - CAPACITY}
        _is_same_as_dense(got, dense_decode(eager, ids, dict(enumerate(rows)), STEPS))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decoding_goes_on_at_the_positions_of_the_prompt(family: str) -> None:
    eager = tiny_model(family, "eager")
    ids = _ids(4)
    positions = [*range(25), *range(100, 100 + LENGTH - 25)]
    with torch.no_grad():
        cache = BlendCache(6)
        with _eviction(eager, cache)():
            got = _generate(eager, cache, ids, positions)
        # Which rows were kept can be read off the keys, which differ from place to place.
        whole = BlendCache(6)
        eager(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), past_key_values=whole)
    kept = {}
    for layer, held in enumerate(cache.kv_layers):
        if held.evicted_tokens:
            count = LENGTH - held.evicted_tokens
            distance = torch.cdist(cache.kv()[layer].keys[0, :, :count], whole.kv()[layer].keys[0])
            kept[layer] = distance.argmin(dim=2)
    assert kept
    _is_same_as_dense(got, dense_decode(eager, ids, kept, STEPS, positions=positions))


def test_the_memory_of_what_is_evicted_is_given_back() -> None:
    model = tiny_model("llama")
    cache = BlendCache(6)
    with torch.no_grad(), _eviction(model, cache, room=3)():
        model(input_ids=torch.tensor([_ids(5)]), past_key_values=cache, use_cache=True)
    kept = LENGTH - 65 + CAPACITY
    for held in cache.kv_layers:
        assert held.keys is not None and held.values is not None
        for tensor in (held.keys, held.values):
            assert tensor.shape == (1, 2, kept, 8)
            assert tensor.untyped_storage().nbytes() == 2 * (kept + 3) * 8 * 4
        assert held.nbytes == 2 * 2 * kept * 8 * 4


def test_attention_that_cannot_be_watched_is_refused_before_the_first_token() -> None:
    # It computes its attention where nobody sees it.
    model = tiny_model("bloom", "eager")
    cache = BlendCache(6)
    with pytest.raises(UnsupportedModelError, match=r"layers 0, 1, 2, 3, 4, 5 cannot be watched.*SnapKV"):
        with torch.no_grad(), _eviction(model, cache)():
            model(input_ids=torch.tensor([_ids(5)]), past_key_values=cache, use_cache=True)
    assert not model._forward_hooks


def test_attention_is_watched_in_this_thread_and_this_block_only() -> None:
    original = AttentionInterface.get_interface
    model = tiny_model("llama")
    seen: list[AttentionCall] = []

    def run() -> None:
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 5]]))

    with watch_attention(seen.append):
        other = threading.Thread(target=run)
        other.start()
        other.join()
        assert not seen
        with watch_attention(lambda call: None):
            run()
        run()
    assert len(seen) == 12
    with pytest.raises(IndexError), watch_attention(lambda call: [][0]):
        run()
    assert AttentionInterface.get_interface is original
    run()
    assert len(seen) == 12
    assert seen[0].scaling == pytest.approx(8**-0.5)


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=9, max_size=9), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([1, 3, 5, 7, 21]),
)
def test_the_choice_is_the_naive_one(weights: list[list[int]], capacity: int, kernel: int) -> None:
    attention = torch.tensor(weights, dtype=torch.float32)
    wanted = [naive_choice(row, capacity, kernel) for row in attention.tolist()]
    assert choose_tokens(attention, capacity, kernel).tolist() == wanted


@pytest.mark.parametrize("additive", [True, False])
def test_soft_caps_sinks_and_masks_of_each_head_count(additive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 5, 8, generator=generator)
    key = torch.randn(1, 2, 12, 8, generator=generator)
    allowed = torch.rand(1, 4, 5, 12, generator=generator) < 0.7
    sinks = torch.randn(4, generator=generator)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf) if additive else allowed
    got = context_attention(AttentionCall(query, key, mask, 0.3, softcap=2.0, sinks=sinks), 3, 2, 9)
    wanted = torch.zeros(2, 7)
    for head in range(4):
        for row in range(2, 5):
            weights = [
                float(torch.exp(2 * torch.tanh(0.3 * (query[0, head, row] @ key[0, head // 2, column]) / 2)))
                if allowed[0, head, row, column]
                else 0.0
                for column in range(12)
            ]
            total = sum(weights) + float(sinks[head].exp())
            wanted[head // 2] += torch.tensor(weights[2:9]) / total
    torch.testing.assert_close(got, wanted)
