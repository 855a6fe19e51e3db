"""Texts without meaning: words of a random model's tokenizer, and words made of syllables."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.chunk import Chunk

__all__ = ["RandomWords", "made_up_word", "text_of"]

_SYLLABLES = ("ba", "den", "fo", "gri", "hal", "ju", "kem", "lo", "mi", "nor", "pa", "ris", "su", "tel", "vo", "wen")


class RandomWords:
    """Tokens and texts drawn one after the other from the vocabulary of a `word_tokenizer`, its BOS left out.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
        The tokenizer, which has a word for each id.
    seed : int
        What is drawn follows from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._vocabulary = len(tokenizer)
        self._generator = torch.Generator().manual_seed(seed)

    def token_ids(self, count: int) -> list[int]:
        """Return so many token ids."""
        return torch.randint(1, self._vocabulary, (count,), generator=self._generator).tolist()

    def text(self, count: int) -> str:
        """Return a text of so many tokens."""
        return text_of(self.token_ids(count))

    def chunks(self, count: int, tokens: int) -> list[Chunk]:
        """Return so many chunks of so many tokens each, with ids of their own."""
        return [Chunk(self.text(tokens), f"chunk {number}") for number in range(count)]

    def choice(self, of: int, count: int) -> list[int]:
        """Return so many different numbers below `of`, in any order."""
        return torch.randperm(of, generator=self._generator)[:count].tolist()


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text that a `word_tokenizer` reads as these token ids."""
    return " ".join(f"t{token}" for token in token_ids)


def made_up_word(chance: random.Random) -> str:
    """Return a word of one to three syllables that most languages could have."""
    return "".join(chance.choices(_SYLLABLES, k=chance.randint(1, 3)))
