"""What a layout needs of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Message", "Tokens"]

Message = dict[str, str]
"""A message as chat templates read it: a role and a content."""


@dataclass(frozen=True)
class Tokens:
    """How text becomes token ids.

    Attributes
    ----------
    tokenize : callable
        From a text to its ids, without special tokens added. Each text of a schema is tokenised on its own.
    filler_id : int
        The token that stands in a parameter's slot while its module is encoded.
    bos_ids : tuple of int
        What every prompt begins with; empty, or the BOS.
    bos_text : str
        How a chat template writes it.
    chat : callable, optional
        From messages to the prompt that the chat template makes of them, up to where the answer begins. None where the tokenizer
        has no template.
    """

    tokenize: Callable[[str], tuple[int, ...]]
    filler_id: int = 0
    bos_ids: tuple[int, ...] = ()
    bos_text: str = ""
    chat: Callable[[Sequence[Message]], str] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Tokens:
        """Take what is needed from a Hugging Face tokenizer.

        Fillers are unk tokens, as in the paper (section 3.3); pad tokens, or else EOS tokens, where a tokenizer knows no unk.

        Parameters
        ----------
        tokenizer : Any
            The model's tokenizer.

        Returns
        -------
        Tokens
            Bound to it.
        """

        def tokenize(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        def chat(messages: Sequence[Message]) -> str:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return text

        fillers = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "pad", "eos"))
        bos = getattr(tokenizer, "bos_token_id", None)
        return cls(
            tokenize,
            next((token for token in fillers if token is not None), 0),
            () if bos is None else (bos,),
            getattr(tokenizer, "bos_token", None) or "",
            chat if getattr(tokenizer, "chat_template", None) else None,
        )
