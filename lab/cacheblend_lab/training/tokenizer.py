"""The reference model's tokenizer: byte-level BPE in which a line break is always a token of its own.

Chunks are tokenised one by one and their ids joined; that equals tokenising the joined text only if nothing reaches
over the border. Here a border beside a line break is always safe: the text is split there before BPE sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cacheblend_lab.reference.prompt import BOS, CHAT_TEMPLATE, EOS, FORMATS, PAD, SPECIAL_TOKENS
from cacheblend_lab.training.fillers import filler_parts
from cacheblend_lab.training.templates import (
    ATTRIBUTES,
    COMPARISONS,
    FILLERS,
    question_templates,
    statement_templates,
)
from cacheblend_lab.training.vocabulary import HEADS_AND_TAILS, PLAIN_PAIRS

__all__ = ["build_tokenizer", "save_tokenizer"]

MAX_LENGTH = 4096
_VOCABULARY = 2048
_WORD = r" ?\p{L}+|\p{N}| ?-+| ?[^\s\p{L}\p{N}]| +|\s"
# Syllables are counted so often that their merges come first; then no word's merge can cut a name elsewhere.
_SYLLABLE_COUNT = 1000


def build_tokenizer(paragraphs: bool = True) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the words of the corpus and wrap it for transformers.

    The weights that are shipped are of a corpus without the words that only paragraphs have.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.Split(Regex(_WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(paragraphs), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files into a folder."""
    tokenizer.save_pretrained(str(folder))


def _words(paragraphs: bool) -> Iterator[str]:
    for heads, tails in HEADS_AND_TAILS.values():
        for head in heads:
            yield from (head, " " + head) * _SYLLABLE_COUNT
        for tail in tails:
            yield from (tail,) * _SYLLABLE_COUNT
    texts = [word for parts in PLAIN_PAIRS.values() for part in parts for word in part]
    texts.extend(FILLERS)
    for name, attribute in ATTRIBUTES.items():
        for template in statement_templates(name, "train") + statement_templates(name, "held_out"):
            texts.append("".join(template))
        texts.extend(
            question_templates(attribute.questions, "train") + question_templates(attribute.questions, "held_out")
        )
        texts.extend((attribute.answer, attribute.clause))
    for comparison in COMPARISONS:
        texts.extend(question_templates(comparison.questions, "train"))
        texts.extend(question_templates(comparison.questions, "held_out"))
    texts.extend(("so yes so no which who and she he it She He It",))
    for form in FORMATS.values():
        texts.extend((form.head, form.middle, form.tail))
    for text in texts:
        text = re.sub("|".join(re.escape(token) for token in SPECIAL_TOKENS), "", text)
        # Every word both after a space and at the start of a line, wherever the corpus happens to use it.
        for word in re.findall(r"[^\W\d_]+|-{2,}", re.sub(r"\{\w\}", "", text)):
            yield from (word, " " + word) * 2
    if paragraphs:
        # Only as they occur: a sentence's first words are capital, and stand after a space or at the start of a line.
        for text in filler_parts():
            for number, word in enumerate(re.findall(r"[^\W\d_]+", text)):
                yield from ((word, " " + word) if word[0].isupper() and not number else (" " + word,)) * 2
