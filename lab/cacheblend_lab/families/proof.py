"""Proof by running that blending is exact on a model, and on a family of models."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cacheblend_lab.families.capability import capability
from cacheblend_lab.families.tiny import VOCABULARY, tiny_config, tiny_model
from cacheblend_lab.family_table import FamilyRow
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.backend import engine_class
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV, shift_layer
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import CACHE, Decoder, KVCache, text_decoder
from cacheblend_rag.selection import Selection

__all__ = ["Proof", "families", "prove", "prove_family"]

# Two adjacent chunks and one after text, longer than the windows of tiny models.
_SPANS = ((5, 25), (25, 47), (50, 70))
_LENGTH = 76
_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Proof:
    """Findings of running a model.

    Attributes
    ----------
    refused : str or None
        Why blending is refused; None where it is not. The model's answers are compared all the same: prompts are prefilled as a
        whole then.
    differences : tuple of (str, float)
        What was compared with the model's own computation, and the largest difference found, over the largest number there: of
        logits, keys and values; for greedy answers the number of tokens that differ.
    tolerance : float
        How much they may differ.
    """

    refused: str | None
    differences: tuple[tuple[str, float], ...] = ()
    tolerance: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether everything that was compared is equal, within the tolerance."""
        return self.refused is None and not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Comparisons that are not equal: a bug, whether blending is refused or not."""
        return tuple(name for name, difference in self.differences if not difference <= self.tolerance)


@torch.no_grad()
def prove(model: PreTrainedModel, tolerance: float = 2e-5) -> Proof:
    """Answer random prompts on a model and compare with its own computation.

    Compared are greedy answers, alone and in a batch, and where blending is not refused: the logits over the model's own KV,
    whatever rows are recomputed (the oracle test); chunks moved to another position with chunks encoded there; prefill with
    everything recomputed; and every pattern of hits and misses.

    Parameters
    ----------
    model : PreTrainedModel
        A model of at least `VOCABULARY` tokens.
    tolerance : float
        How much logits, keys and values may differ, over the largest of them.
    """
    why = _why_it_cannot_run(model)
    if why is not None:
        return Proof(why)
    # The prompt's first chunk stands where it was encoded, but after other text.
    config = EngineConfig(preamble=_words(4, 9), prefix_bytes=0)
    # That of models with recurrent layers, where it is installed.
    kind = engine_class(model) or BlendEngine
    with kind(model, _tokenizer(), config=config) as engine:
        differences: list[tuple[str, float]] = []
        if engine.decoder is not None:
            differences += [("oracle", _oracle(engine.decoder)), ("shift", _shift(engine.decoder))]
            differences += [("in a document", _after(engine.decoder))] if engine.decoder.is_movable else []
        differences += _answers(engine)
        return Proof(engine.unsupported_reason, tuple(differences), tolerance)


def _why_it_cannot_run(model: PreTrainedModel) -> str | None:
    """Return why a model cannot answer a prompt of token ids by itself, without us; None where it can."""
    try:
        _own_answer(model, torch.tensor([_ids(0, 8)], device=model.device))
    except Exception as error:
        return f"{type(model).__name__} does not answer a prompt of text by itself: {type(error).__name__}: {error}"
    return None


def _own_answer(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    answer = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=_OUTPUT_TOKENS, do_sample=False
    )
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens


def _ids(seed: int, count: int = _LENGTH) -> list[int]:
    drawn: list[int] = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _oracle(decoder: Decoder) -> float:
    ids = _ids(1)
    inputs = torch.tensor([ids], device=decoder.device)
    layout = PromptLayout(tuple(ids), tuple(range(_LENGTH)), tuple(ChunkSpan(a, b, a) for a, b in _SPANS))
    own = KVCache(decoder.num_layers)
    wanted = decoder.model(input_ids=inputs, **{CACHE: own}, use_cache=True).logits[0, -1]
    draw = random.Random(0)
    worst = 0.0
    for ratio in (0.0, 0.05, 0.15, 0.5):
        rows = sorted(draw.sample(layout.context_rows.tolist(), round(ratio * layout.context_tokens)))
        cache = BlendCache(decoder.num_layers)
        selection = Selection(torch.tensor(rows, dtype=torch.int64))
        with Steering(decoder, cache, layout, selection, true_kv(own.kv()))():
            got = decoder.model(input_ids=inputs, **{CACHE: cache}, use_cache=True).logits[0, -1]
        worst = max(worst, _distance(got, wanted))
    return worst


def _shift(decoder: Decoder) -> float:
    prefix, chunk = _ids(2, 3), _ids(3, 20)
    inputs = torch.tensor([[*prefix, *chunk]], device=decoder.device)
    [[(_, encoded)]] = Encoder(decoder, prefix, 4096).encode([Target(tuple(chunk))])
    worst = 0.0
    for distance in (1, 30, 200) if decoder.is_movable else (0,):
        there = decoder.kv_at(inputs, distance)
        for rotation, stored, layer in zip(decoder.rotations, encoded.layers, there, strict=True):
            moved = LayerKV(*(part.clone() for part in stored))
            if rotation is not None:
                shift_layer(moved, rotation.table(torch.full((len(chunk),), distance), moved.keys.device))
            for ours, own in zip(moved, layer, strict=True):
                worst = max(worst, _distance(ours, own[0, :, len(prefix) :].cpu()))
    return worst


def _after(decoder: Decoder) -> float:
    """Return how far the KV of a document's chunks is from that of plain forwards; two of them overlap."""
    prefix, text = tuple(_ids(2, 3)), tuple(_ids(4, 60))
    targets = [
        Target(text[:20]),
        Target(text[20:40], text[:20]),
        Target((5, *text[35:50]), text[:35]),
    ]
    worst = 0.0
    for batch in Encoder(decoder, prefix, 4096).encode(targets):
        for index, encoded in batch:
            target = targets[index]
            first, count = len(prefix) + len(target.context), len(target.token_ids)
            cache = KVCache(decoder.num_layers)
            inputs = torch.tensor([[*prefix, *target.context, *target.token_ids]], device=decoder.device)
            text_decoder(decoder.model)(input_ids=inputs, **{CACHE: cache}, use_cache=True)
            for rotation, stored, layer in zip(decoder.rotations, encoded.layers, cache.kv(), strict=True):
                moved = LayerKV(*(part.clone() for part in stored))
                if rotation is not None:
                    distances = torch.full((count,), len(target.context))
                    shift_layer(moved, rotation.table(distances, moved.keys.device))
                for ours, own in zip(moved, layer, strict=True):
                    worst = max(worst, _distance(ours, own[0, :, first:].cpu()))
    return worst


def _answers(engine: BlendEngine) -> Iterator[tuple[str, float]]:
    model = engine.model
    chunks = [Chunk(_words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20))]
    prompt = BlendPrompt(
        segments=[_words(4, 10), ChunkRef("n0"), ChunkRef("n1"), _words(3, 11), ChunkRef("n2"), _words(6, 12)]
    )
    engine.add(chunks)
    ids = torch.tensor([engine.prompt_ids(prompt)], device=model.device)
    everything = engine.blend.replace(recompute_ratio=1.0)
    yield (
        "ratio 1.0",
        _distance(engine.prefill(prompt, blend=everything).logits, model(input_ids=ids).logits[0, -1].cpu()),
    )

    some = engine.blend.replace(recompute_ratio=0.15, selector="boundary")
    hits = engine.prefill(prompt, blend=some).logits
    worst = 0.0
    for missing in (["n1"], ["n0", "n2"], ["n0", "n1", "n2"]):
        for key in _keys(engine, missing):
            engine._store.discard(key)
        worst = max(worst, _distance(engine.prefill(prompt, blend=some).logits, hits))
        engine.flush()
    yield "hits and misses", worst

    own = _own_answer(model, ids)
    got = engine.generate(prompt, _OUTPUT_TOKENS, blend=everything, do_sample=False).token_ids
    yield "greedy answer", _differing(got, own)

    other = BlendPrompt(segments=[_words(4, 13), ChunkRef("n1"), _words(5, 14)])
    together = engine.generate_many([prompt, other], _OUTPUT_TOKENS, blend=some, do_sample=False)
    alone = [engine.generate(each, _OUTPUT_TOKENS, blend=some, do_sample=False) for each in (prompt, other)]
    yield (
        "answers in a batch",
        sum(_differing(a.token_ids, b.token_ids) for a, b in zip(together, alone, strict=True)),
    )


def _differing(some: Sequence[int], others: Sequence[int]) -> float:
    return float(sum(a != b for a, b in zip(some, others, strict=False)) + abs(len(some) - len(others)))


def _keys(engine: BlendEngine, names: Sequence[str]) -> list[str]:
    return [key for record in engine.records(names) if record is not None for key in record.keys]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def _words(count: int, seed: int) -> str:
    return " ".join(f"t{number}" for number in _ids(seed, count))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tiny vocabulary: the word "t7" is token 7, and words are split at spaces."""
    names = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {name: number for number, name in enumerate(names)} | {f"t{n}": n for n in range(3, VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


_MOST_REASON = 300


def families() -> list[str]:
    """Return every family of causal language models that the installed transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def prove_family(family: str, tolerance: float = 2e-5) -> FamilyRow:
    """Build a tiny random model of a family and see whether blending is exact on it.

    Parameters
    ----------
    family : str
        One of `families`.
    tolerance : float
        How much logits, keys and values may differ from the model's own, over the largest of them.
    """
    try:
        model = tiny_model(tiny_config(family))
    except CacheBlendError:
        raise
    except Exception as error:
        why = f"transformers builds no small language model from its configuration: {error}"
        return FamilyRow(family, f"refused: {_short(why)}")
    proof = prove(model, tolerance)
    if proof.failed:
        return FamilyRow(family, f"wrong: {', '.join(proof.failed)}")
    if proof.refused is not None:
        return FamilyRow(family, f"refused: {_short(proof.refused)}")
    seen = capability(model)
    return FamilyRow(family, "exact", seen.attention, seen.positions)


def _short(reason: str) -> str:
    line = re.sub(r"\s+", " ", reason).strip()
    return line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 1] + "…"
