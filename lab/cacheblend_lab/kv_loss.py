"""Loss of answers over KV that was moved, or packed by a codec: ``python -m cacheblend_lab.kv_loss MODEL DTYPE``."""

from __future__ import annotations

import pydoc_data.topics
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.codec import codec_names, make_codec, unpack_layer
from cacheblend_rag.kv import LayerKV, shift_layer
from cacheblend_rag.model import CACHE, Decoder, KVCache, inspect_model

__all__ = ["MANUAL_PAGES", "kv_loss"]

MANUAL_PAGES = tuple(
    pydoc_data.topics.topics[topic] for topic in "with try for class import yield lambda assert".split()
)
"""Pages of Python's own manual."""

_CHUNK_TOKENS, _ANSWER_TOKENS, _DISTANCE, _ROOM = 384, 32, 1000, 512
_QUESTION = "\n\nQuestion: What does the page above say? Answer in a sentence.\nAnswer:"


@torch.no_grad()
def kv_loss(model: PreTrainedModel, tokenizer: object, texts: tuple[str, ...] = MANUAL_PAGES) -> dict[str, float]:
    """Measure what moving and packing KV changes in what a model answers about texts.

    Parameters
    ----------
    model : PreTrainedModel
        A model whose KV can be moved.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    texts : tuple of str
        What is asked about, one by one; the first 384 tokens of each are read.

    Returns
    -------
    dict of str to float
        The mean KL divergence of the next token's distribution, in nats, over the answer that the model gives by itself: of
        "moved", from KV computed 1,000 positions further on, and of each codec, from KV that was moved as it is.
    """
    decoder = inspect_model(model)
    sums: dict[str, float] = {}
    for text in texts:
        ids, question = (_ids(tokenizer, each, decoder.device) for each in (text, _QUESTION))
        ids = ids[:, :_CHUNK_TOKENS]
        there, stored = decoder.kv_at(ids, _DISTANCE), decoder.kv_at(ids, 0)
        asked = _answered(decoder, there, question)
        wanted = _scores(decoder, there, asked, question.shape[1])
        moved = _scores(decoder, _moved(decoder, stored), asked, question.shape[1])
        found = {"moved": _divergence(wanted, moved)}
        for name in codec_names()[1:]:
            codec = make_codec(name)
            layers = [unpack_layer(codec.pack(LayerKV(*(part[0] for part in kv)))) for kv in stored]
            packed = _moved(decoder, [LayerKV(*(part[None] for part in kv)) for kv in layers])
            found[name] = _divergence(moved, _scores(decoder, packed, asked, question.shape[1]))
        for name, divergence in found.items():
            sums[name] = sums.get(name, 0.0) + divergence / len(texts)
    return sums


def _ids(tokenizer: object, text: str, device: torch.device) -> torch.Tensor:
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=device)  # type: ignore[operator]


def _moved(decoder: Decoder, stored: list[LayerKV]) -> list[LayerKV]:
    layers = [LayerKV(*(part.clone() for part in kv)) for kv in stored]
    for kv, rotation in zip(layers, decoder.rotations, strict=True):
        if rotation is not None:
            shift_layer(kv, rotation.table(torch.full((kv.keys.shape[2],), _DISTANCE), kv.keys.device))
    return layers


def _scores(decoder: Decoder, chunk: list[LayerKV], asked: torch.Tensor, first: int) -> torch.Tensor:
    """Return the logarithms of the probabilities of what follows the question, and each token of the answer."""
    return _run(decoder, KVCache.after(chunk, 1, _ROOM), asked)[first - 1 :].log_softmax(dim=-1)


def _answered(decoder: Decoder, chunk: list[LayerKV], question: torch.Tensor) -> torch.Tensor:
    """Return the question with the model's own greedy answer."""
    cache, tokens = KVCache.after(chunk, 1, _ROOM), [question]
    while len(tokens) <= _ANSWER_TOKENS:
        tokens.append(_run(decoder, cache, tokens[-1])[-1:].argmax(dim=-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def _run(decoder: Decoder, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    start = _DISTANCE + cache.get_seq_length()
    positions = torch.arange(start, start + ids.shape[1], device=decoder.device)[None]
    logits: torch.Tensor = decoder.model(input_ids=ids, position_ids=positions, **{CACHE: cache}, use_cache=True).logits
    return logits[0].float()


def _divergence(wanted: torch.Tensor, given: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - given)).sum(dim=-1).mean())


def main(model: str, dtype: str) -> None:
    """Print the loss of moving KV and of each codec on a model."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    for name, loss in kv_loss(loaded, AutoTokenizer.from_pretrained(model)).items():
        print(f"{name:10} {loss:.5f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
