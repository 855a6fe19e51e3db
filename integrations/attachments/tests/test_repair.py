"""Decode-time repair: exact over true KV, and against a dense reference over stale KV."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cacheblend_attachments import Repair
from cacheblend_attachments.repair import Repairing, pick_segments, segment_numbers
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import CACHE, inspect_model
from cacheblend_rag.selection import Selection
from tests.core.dense import (
    LENGTH,
    SPANS,
    RecordingCache,
    own_kv,
    random_ids,
    read_behind,
    span_layout,
    span_prompt,
    stale_kv,
)
from tests.core.test_selectors import layouts
from tests.families import CASES, tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4


@pytest.fixture(params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(*request.param)


@torch.no_grad()
def test_repairing_true_kv_changes_nothing(model: PreTrainedModel) -> None:
    decoder = inspect_model(model)
    ids = torch.tensor([random_ids(1)])
    layout = span_layout(ids[0].tolist())
    own = true_kv([LayerKV(*kv) for kv in own_kv(model, ids[0].tolist())])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    scored = {"return_dict_in_generate": True, "output_logits": True}
    wanted = model.generate(ids, **options, **scored)
    cache = BlendCache(decoder.num_layers)
    steering = Steering(decoder, cache, layout, Selection(torch.tensor([], dtype=torch.int64)), own)
    repair = Repairing(Repair(0.6, limit=0.0, stop_layer=6), decoder, cache, layout, steering)
    with steering(), repair():
        got = model.generate(ids, **{CACHE: cache}, **options, **scored)
    assert 0 < repair.repaired_rows < 62
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for one, other in zip(got.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() < TOLERANCE
    # Every repaired row cost a block in every layer, and so did the step that was redone.
    assert repair.charge >= decoder.num_layers * (repair.repaired_rows + 1)


class _Replacing(RecordingCache):
    """Puts given KV in place of the rows that are not computed."""

    def __init__(self, kv: list[tuple[torch.Tensor, torch.Tensor]], computed: list[int]) -> None:
        super().__init__()
        self._kv = kv
        self._computed = computed

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object):
        mixed = []
        for stale, new in zip(self._kv[layer], (keys, values), strict=True):
            whole = torch.zeros_like(new)
            whole[:, :, : stale.shape[2]] = stale
            whole[:, :, self._computed] = new[:, :, self._computed]
            mixed.append(whole)
        return super().update(*mixed, layer)


@pytest.mark.parametrize("limited", [False, True])
@torch.no_grad()
def test_a_repaired_step_is_the_dense_reference(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    monkeypatch.setattr("cacheblend_attachments.repair._SEGMENT_TOKENS", 1)
    model = tiny_model("llama", "eager")
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True)) as engine:
        prompt = span_prompt(engine)
        ids, prefixes = list(engine.prompt_ids(prompt)), read_behind(engine, prompt)
        rows = [row for a, b in SPANS for row in range(a, b)]
        text = [row for row in range(LENGTH) if row not in rows]
        # The prefill without any recompute, and the first step behind it.
        prefill = _Replacing(stale_kv(model, ids, SPANS, prefixes), text)
        first = int(model(torch.tensor([ids]), **{CACHE: prefill}, use_cache=True).logits[0, -1].argmax())
        held = [(layer.keys, layer.values) for layer in prefill.layers]
        options = {"input_ids": torch.tensor([[*ids, first]]), "use_cache": True, "output_attentions": True}
        step = model(**options, **{CACHE: _Replacing(held, [LENGTH])})
        mass = torch.stack([step.attentions[layer][0, :, -1][:, rows].mean(dim=0) for layer in (1, 2)]).mean(dim=0)
        heaviest = mass.argsort(descending=True)
        limit = float(mass[heaviest[5:7]].mean()) if limited else 0.0
        engine.attach(Repair(0.5 if limited else 0.25, limit=limit, look_layers=(1, 2), stop_layer=6))
        result = engine.generate(prompt, 2, do_sample=False, min_new_tokens=2)
    repaired = result.report.repaired_tokens
    # A quarter of the work, less the newest token's own redone step and what was spent on looking.
    assert repaired == 6 if limited else 10 < repaired < 0.25 * 62
    chosen = [rows[index] for index in heaviest[:repaired].tolist()]
    redone = model(**options, **{CACHE: _Replacing(held, [*chosen, LENGTH])})
    assert result.token_ids == (first, int(redone.logits[0, -1].argmax()))
    assert limited or result.report.charged_ratio <= 0.25


@pytest.mark.parametrize("budget", [0, 0.02])
def test_without_a_budget_nothing_is_watched_and_a_spent_one_costs_nothing_more(budget: float) -> None:
    with BlendEngine(tiny_model("llama", "sdpa"), tiny_tokenizer(), **engine_settings()) as engine:
        engine.attach(Repair(budget, limit=0.0))
        engine.add([Chunk(words(20, 0), "n0"), Chunk(words(30, 3), "n1")])
        report = engine.generate(BlendPrompt(words(4, 1), ["n0", "n1"], words(5, 2)), 60, min_new_tokens=60).report
        assert report.charged_ratio <= budget


@given(layouts(), st.integers(1, 12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_whole_segments_are_picked_by_their_mean_score(layout: PromptLayout, most: int, budget: int, draw) -> None:
    rows = layout.context_rows
    scores = torch.tensor([draw.random() for _ in rows])
    picked = pick_segments(scores, rows, budget, layout, most).tolist()
    # A segment never leaves its chunk, which is cut into as few as may be, of like length.
    numbers = segment_numbers(layout, rows, most)
    assert sorted(set(numbers.tolist())) == list(range(int(numbers.max()) + 1))
    for span in layout.chunks:
        inside = (rows >= span.start) & (rows < span.stop)
        assert not torch.isin(numbers[~inside], numbers[inside]).any()
        lengths = torch.bincount(numbers[inside] - numbers[inside][0])
        assert lengths.max() - lengths.min() <= 1 and lengths.numel() == -(-len(span) // most)
    members = [(numbers == number).nonzero().flatten().tolist() for number in range(int(numbers.max()) + 1)]
    wanted: list[int] = []
    for indices in sorted(members, key=lambda each: -float(scores[each].mean())):
        best = sorted(indices, key=lambda index: -float(scores[index]))
        wanted += best[: max(0, budget - len(wanted))]
    assert picked == sorted(rows[wanted].tolist())
