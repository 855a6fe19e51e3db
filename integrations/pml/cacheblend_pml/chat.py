"""The tokenizer as layouts use it: its tokens, and the words of its chat template around messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from cacheblend_pml.nodes import Place, Role
from cacheblend_rag.lexer import lexer_of

__all__ = ["ChatFrame", "Message", "Tokens"]

Message = dict[str, str]
"""A message as chat templates read it: a role and a content."""

# Characters that no language uses; the first that stands in no text of a prompt marks where a message's content belongs.
_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True)
class Tokens:
    """A tokenizer: `tokenize` makes ids of a text, without special tokens; each text of a schema is tokenised on its own.

    `filler_id` stands in a parameter's slot while its module is encoded. A prompt begins with `bos_ids`, empty or the BOS, which
    a chat template writes as `bos_text`. `chat`, where there is a template, makes of messages the prompt up to its answer. `said`
    has no control token made of a text.
    """

    tokenize: Callable[[str], tuple[int, ...]]
    filler_id: int = 0
    bos_ids: tuple[int, ...] = ()
    bos_text: str = ""
    chat: Callable[[Sequence[Message]], str] | None = None
    said: Callable[[str], str] = str

    @classmethod
    def of(cls, tokenizer: Any) -> Tokens:
        """Take what is needed from a Hugging Face tokenizer.

        Fillers are unk tokens, as in the paper (section 3.3); pad tokens, or else EOS tokens, where a tokenizer knows no unk.
        """
        lexer = lexer_of(tokenizer)

        def tokenize(text: str) -> tuple[int, ...]:
            return tuple(lexer.read(text)[0])

        def chat(messages: Sequence[Message]) -> str:
            said = lexer.said(messages)
            text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            return text

        fillers = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "pad", "eos"))
        bos = getattr(tokenizer, "bos_token_id", None)
        return cls(
            tokenize,
            next((token for token in fillers if token is not None), 0),
            () if bos is None else (bos,),
            getattr(tokenizer, "bos_token", None) or "",
            chat if getattr(tokenizer, "chat_template", None) else None,
            lexer.said,
        )


class ChatFrame:
    """The words of the chat template before the content of each message of a schema, and after the last one.

    The template is run over messages whose contents are marks, and what comes out is cut at the marks. So it may write what it
    likes around a message, move the system message into the user's, or add one of its own. What stands before a mark is fixed
    text of the schema (`heads`; the first begins with the BOS if the template writes it). What stands after the last one depends
    on how the prompt goes on, and is computed with each prompt. A template that drops, repeats or reorders messages cannot be
    cut, nor one that words early messages differently because of later ones: both raise `PMLError`.
    """

    def __init__(self, roles: Sequence[Role], tokens: Tokens) -> None:
        self._roles = roles
        self._tokens = tokens
        # A question is to follow. Some templates word the last answer of a chat differently.
        asked = [] if not roles or roles[-1].role == "user" else [{"role": "user", "content": "question"}]
        self.heads = self._render(asked, "", roles[0].place)[:-1] if roles else []

    def tail(self, text: str, messages: Sequence[Message], place: Place, *, ends_line: bool) -> str:
        """Return what stands after the schema's last message in one prompt, up to where the answer begins.

        `text` is the prompt's own text in no message. It goes on with the schema's last message where that is the user's, on a
        line of its own unless what stands before it ends one; else it is a user's message. The prompt's `messages` follow it.
        """
        more = ""
        if text and self._roles and self._roles[-1].role == "user":
            more = text if ends_line or text[0].isspace() else f"\n{text}"
        elif text:
            messages = [{"role": "user", "content": text}, *messages]
        *heads, tail = self._render(messages, more, place)
        for head, was, role in zip(heads, self.heads, self._roles, strict=True):
            if head != was:
                raise place.error(
                    f"with the messages of this prompt the model's chat template writes {head!r:.80} before the <{role.role}> at "
                    f"{role.place}, and {was!r:.80} without them, so its KV cannot be reused; change the order of the "
                    "messages, or write the template's words yourself, without <system>, <user> and <assistant>"
                )
        return tail if self._roles else tail.removeprefix(self._tokens.bos_text)

    def _render(self, messages: Sequence[Message], more: str, place: Place) -> list[str]:
        """Return the text before each mark and, last, that after them; `more` goes on with the last message of the schema."""
        given = "".join([more, *(message["content"] for message in messages)])
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in given)
        marks = [f"{mark}{number}{mark}" for number in range(len(self._roles))]
        whole = [{"role": role.role, "content": each} for role, each in zip(self._roles, marks, strict=True)]
        if more:
            whole[-1]["content"] += more
        text = self._write([*whole, *messages], place)
        cut: list[str] = []
        for role, each in zip(self._roles, marks, strict=True):
            head, found, text = text.partition(each)
            if not found or mark in head or each in text:
                raise role.place.error(
                    f"the model's chat template drops, repeats or moves the content of this <{role.role}>, so it has no fixed "
                    "place; change the order of the messages, or write the template's words yourself, without <system>, "
                    "<user> and <assistant>"
                )
            cut.append(head)
        return [*cut, text]

    def _write(self, messages: Sequence[Message], place: Place) -> str:
        if self._tokens.chat is None:
            raise place.error(
                "<system>, <user> and <assistant> are written by the model's chat template, and its tokenizer has none; set "
                "tokenizer.chat_template, or write the words yourself, without these elements"
            )
        try:
            return self._tokens.chat(messages)
        except TemplateError as error:
            refusal = error
        if len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
            # Some models know no system message. They read it at the head of the first question.
            both = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            try:
                return self._tokens.chat([{"role": "user", "content": both}, *messages[2:]])
            except TemplateError:
                pass
        raise place.error(
            f"the model's chat template refuses messages with the roles {[message['role'] for message in messages]}: "
            f"{refusal}; change their order"
        ) from refusal
