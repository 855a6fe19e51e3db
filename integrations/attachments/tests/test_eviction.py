"""What each head keeps, and decoding on it, against naive references on every family."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, PreTrainedModel

from cacheblend_attachments.snapkv import Eviction, SnapKV, choose_tokens
from cacheblend_rag.engine.backend import RunningForward
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import CACHE, inspect_model
from cacheblend_rag.selection import Selection
from tests.core.dense import RecordingCache
from tests.families import CASES, tiny_model

TOLERANCE = 1e-4
SPANS = ((5, 25), (25, 47), (50, 70))
CONTEXT = (5, 70)
LENGTH = 78
CAPACITY, WINDOW, KERNEL = 17, 4, 3
STEPS = 8
SLIDING = {"mistral": range(6), "starcoder2": range(6), "gemma2": (0, 2, 4), "gemma3": (0, 1, 3, 4)}
SLIDING["gpt-oss"] = SLIDING["gemma2"]


@torch.no_grad()
def eager_forward(
    model: PreTrainedModel, ids: list[int], positions: list[int]
) -> tuple[list[torch.Tensor], list[LayerKV]]:
    """The weights that eager attention hands out, and KV, layer by layer."""
    cache = RecordingCache()
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
    output = model(**inputs, **{CACHE: cache}, use_cache=True, output_attentions=True)
    return list(output.attentions), [LayerKV(layer.keys, layer.values) for layer in cache.layers]


def kept_rows(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Which rows each key head of a layer keeps, ascending, ``(num_kv_heads, kept)``."""
    start, stop = CONTEXT
    group = weights.shape[1] // heads
    rows = []
    for head in range(heads):
        seen = weights[0, head * group :][:group, LENGTH - WINDOW :]
        kept = naive_choice([float(seen[..., row].sum()) for row in range(start, stop)], CAPACITY, KERNEL)
        rows.append([*range(start), *(start + token for token in kept), *range(stop, LENGTH)])
    return torch.tensor(rows)


def naive_choice(own: Sequence[float], capacity: int, kernel: int) -> list[int]:
    """Return the tokens kept of those with this attention: by the pooled, then by their own, then the earlier."""
    reach = kernel // 2
    pooled = [max(own[max(0, token - reach) : token + reach + 1]) for token in range(len(own))]
    return sorted(sorted(range(len(own)), key=lambda token: (-pooled[token], -own[token], token))[:capacity])


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
    model: PreTrainedModel, ids: list[int], kept: dict[int, torch.Tensor], positions: list[int]
) -> tuple[list[int], torch.Tensor]:
    """Decode greedily on a cache that holds everything, each key head seeing what it `kept`; return tokens and their logits."""
    cache = RecordingCache()
    tokens, logits = [], []
    fed, at = ids, positions
    for _ in range(STEPS):
        with hidden_columns(kept, LENGTH):
            inputs = {"input_ids": torch.tensor([fed]), "position_ids": torch.tensor([at])}
            output = model(**inputs, **{CACHE: cache}, use_cache=True)
        logits.append(output.logits[0, -1])
        fed, at = [int(logits[-1].argmax())], [at[-1] + 1]
        tokens += fed
    return tokens, torch.stack(logits)


def _ids(seed: int) -> list[int]:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def _eviction(model: PreTrainedModel, cache: BlendCache, room: int = 4) -> Eviction:
    prompt = SimpleNamespace(layout=range(LENGTH), context=CONTEXT)
    run = SimpleNamespace(state=SimpleNamespace(selection=None), prompt=prompt)
    asked = SnapKV(CAPACITY, observation_window=WINDOW, pooling_kernel=KERNEL)
    return Eviction(asked, RunningForward(run, SimpleNamespace(model=model), cache, None, STEPS, room))  # type: ignore[arg-type]


def _generate(
    model: PreTrainedModel, cache: BlendCache, ids: list[int], positions: Sequence[int] = range(LENGTH)
) -> tuple[list[int], torch.Tensor]:
    inputs = torch.tensor([ids])
    output = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        position_ids=torch.tensor([list(positions)]),
        **{CACHE: cache},
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, LENGTH:].tolist(), torch.cat(output.logits)


WAYS = [(*case, way) for way in ("plain", "blended") for case in [*CASES, ("gpt-oss", "eager")]]
# A window that holds prompt and answer; positions with a gap.
WAYS += [(family, attention, "wide") for family in ("mistral", "gemma3") for attention in ("sdpa", "eager")]
WAYS += [(family, "eager", "gapped") for family in ("llama", "gemma2")]


@pytest.mark.parametrize(("family", "attention", "way"), WAYS)
@torch.no_grad()
def test_each_head_keeps_what_eager_weights_say_and_decodes_with_the_rest_masked(
    family: str, attention: str, way: str
) -> None:
    """Blended is over the model's own KV, with a few rows recomputed."""
    model, eager = tiny_model(family, attention), tiny_model(family, "eager")
    if way == "wide":
        model.config.sliding_window = eager.config.sliding_window = LENGTH + STEPS
    whole = () if way == "wide" else SLIDING.get(family, ())
    ids, gap = _ids(1), 75 if way == "gapped" else 0
    positions = [*range(25), *range(25 + gap, LENGTH + gap)]
    attentions, own = eager_forward(eager, ids, positions)
    rows = [kept_rows(weights, kv.keys.shape[1]) for weights, kv in zip(attentions, own, strict=True)]
    layout = PromptLayout(tuple(ids), tuple(range(LENGTH)), tuple(ChunkSpan(a, b, a) for a, b in SPANS))
    cache = BlendCache(len(rows))
    eviction = _eviction(model, cache)
    selection = Selection(torch.tensor([6, 11, 12, 33, 46, 69]))
    steering = Steering(inspect_model(model), cache, layout, selection, true_kv(own))
    with steering() if way == "blended" else nullcontext(), eviction():
        got = _generate(model, cache, ids, positions)
    for layer, wanted in enumerate(rows):
        held = cache.kv_layers[layer]
        if layer in whole:
            wanted = torch.arange(LENGTH).expand(wanted.shape[0], -1)
        assert held.evicted_tokens == LENGTH - wanted.shape[1]
        assert held.get_seq_length() == LENGTH + STEPS - 1
        for mine, theirs in zip(cache.kv()[layer], own[layer], strict=True):
            index = wanted[None, :, :, None].expand(-1, -1, -1, theirs.shape[3])
            assert (mine[:, :, : wanted.shape[1]] - theirs.gather(2, index)).abs().max() < TOLERANCE
    assert eviction.evicted_tokens == (0 if len(whole) == 6 else 65 - CAPACITY)
    assert (eviction.kept_reason is None) == (len(whole) == 0)
    kept = {layer: each for layer, each in enumerate(rows) if layer not in whole}
    tokens, logits = dense_decode(eager, ids, kept, positions)
    # generate may not choose the end token before the last step; the reference may, and is compared up to there.
    count = next((step + 1 for step in range(STEPS) if got[0][step] != tokens[step]), STEPS)
    assert count == STEPS or tokens[count - 1] == 2
    assert (got[1][:count] - logits[:count]).abs().max() < TOLERANCE


def test_another_prompt_on_the_same_model_is_left_alone_and_ends_nothing() -> None:
    model, others = tiny_model("llama"), _ids(5)
    cache, other = BlendCache(6), BlendCache(6)
    with _eviction(model, cache)():
        beside = _generate(model, other, others)
        _generate(model, cache, _ids(4))
    assert [layer.evicted_tokens for layer in cache.kv_layers] == [65 - CAPACITY] * 6
    assert not any(layer.evicted_tokens for layer in other.kv_layers)
    assert torch.equal(beside[1], _generate(model, BlendCache(6), others)[1])


def test_the_memory_of_what_is_evicted_is_given_back() -> None:
    model = tiny_model("llama")
    cache = BlendCache(6)
    with torch.no_grad(), _eviction(model, cache, room=3)():
        model(input_ids=torch.tensor([_ids(5)]), **{CACHE: cache}, use_cache=True)
    kept = LENGTH - 65 + CAPACITY
    for held in cache.kv_layers:
        assert held.keys is not None and held.values is not None
        for tensor in (held.keys, held.values):
            assert tensor.shape == (1, 2, kept, 8)
            assert tensor.untyped_storage().nbytes() == 2 * (kept + 3) * 8 * 4
        assert held.nbytes == 2 * 2 * kept * 8 * 4


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
