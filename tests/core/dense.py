"""A naive blended prefill: every row through every layer, and stale KV put in where a row is not recomputed."""

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicLayer, PreTrainedModel

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import CACHE
from tests.engines import preamble_of
from tests.families import words

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class RecordingCache(Cache):
    """transformers' own growing layers, all of them whole, whatever the model's windows are."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)


@torch.no_grad()
def own_kv(model: PreTrainedModel, ids: Sequence[int], first_position: int = 0) -> Pairs:
    """Return the model's own KV of `ids`, computed at positions from `first_position` on."""
    cache = RecordingCache()
    positions = torch.arange(len(ids))[None] + first_position
    model(input_ids=torch.tensor([ids]), position_ids=positions, **{CACHE: cache}, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


class _Substituting(RecordingCache):
    def __init__(self, stale: Pairs, chunk_rows: torch.Tensor, chosen: torch.Tensor, checks: dict[int, int]) -> None:
        super().__init__()
        self._stale = stale
        self._chunk_rows = chunk_rows
        self._chosen = chosen
        self._checks = checks

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object):
        stale_keys, stale_values = self._stale[layer]
        fresh_rows = self._chosen
        if layer in self._checks:
            deviation = (values - stale_values)[:, :, self._chosen].square().sum(dim=(0, 1, 3))
            best = deviation.argsort(descending=True)[: self._checks[layer]]
            self._chosen = self._chosen[best].sort().values
        if self._checks and layer < min(self._checks):
            fresh_rows = self._chunk_rows
        reused = torch.ones(keys.shape[2], dtype=torch.bool)
        reused[fresh_rows] = False
        text = torch.ones(keys.shape[2], dtype=torch.bool)
        text[self._chunk_rows] = False
        reused &= ~text
        mixed_keys = torch.where(reused[None, None, :, None], stale_keys, keys)
        mixed_values = torch.where(reused[None, None, :, None], stale_values, values)
        return super().update(mixed_keys, mixed_values, layer)


def read_behind(engine: BlendEngine, prompt: BlendPrompt) -> list[list[int]]:
    """Return what each chunk of a prompt, all of them added, is encoded behind: the preamble, and for the first nothing else."""
    ids = [str(each.id) for each in prompt.segments if isinstance(each, Chunk | ChunkRef)]
    behind: list[list[int]] = [[]]
    for record in engine.records(ids)[1:]:
        assert record is not None and record.later is not None and record.later.behind
        behind.append(list(record.later.behind))
    return [[*preamble_of(engine), *each] for each in behind]


@torch.no_grad()
def stale_kv(
    model: PreTrainedModel,
    ids: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    prefixes: Sequence[Sequence[int]],
) -> Pairs:
    """Return the KV of chunks, each encoded behind its own prefix, at their place in a prompt; zero elsewhere."""
    whole = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in own_kv(model, ids)]
    for (start, stop), prefix in zip(chunks, prefixes, strict=True):
        # The chunk behind its prefix, computed where it stands in the prompt: no key is ever moved.
        alone = own_kv(model, [*prefix, *ids[start:stop]], first_position=start - len(prefix))
        for (keys, values), (own_keys, own_values) in zip(whole, alone, strict=True):
            keys[:, :, start:stop] = own_keys[:, :, len(prefix) :]
            values[:, :, start:stop] = own_values[:, :, len(prefix) :]
    return whole


@torch.no_grad()
def dense_blend(
    model: PreTrainedModel,
    ids: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    prefixes: Sequence[Sequence[int]],
    recomputed: torch.Tensor | None = None,
    checks: dict[int, int] | None = None,
) -> torch.Tensor:
    """Return the logits behind `ids`, whose `chunks` are stale KV encoded behind `prefixes`.

    Recomputed are the same rows in every layer, or as many as `checks` says of each check layer, by the deviation of values.
    """
    whole = stale_kv(model, ids, chunks, prefixes)
    rows = torch.cat([torch.arange(start, stop) for start, stop in chunks])
    cache = _Substituting(whole, rows, rows if recomputed is None else recomputed, checks or {})
    return model(input_ids=torch.tensor([ids]), **{CACHE: cache}, use_cache=True).logits[0, -1]


SPANS = ((5, 25), (25, 47), (50, 70))
LENGTH = 76


def random_ids(seed: int) -> list[int]:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def span_layout(ids: list[int]) -> PromptLayout:
    return PromptLayout(tuple(ids), tuple(range(len(ids))), tuple(ChunkSpan(a, b, a) for a, b in SPANS))


def span_prompt(engine: BlendEngine) -> BlendPrompt:
    """Return a prompt of `LENGTH` tokens, the chunks of which, at `SPANS`, the engine has."""
    chunks = [Chunk(words(stop - start, seed), f"n{seed}") for seed, (start, stop) in enumerate(SPANS)]
    engine.add(chunks)
    return BlendPrompt(segments=[words(4, 10), *chunks[:2], words(3, 11), chunks[2], words(6, 12)])
