"""The words that a model's chat template puts around the messages of a schema and of its prompts."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from cacheblend_rag.pml.nodes import Place, Role
from cacheblend_rag.pml.tokens import Message, Tokens

__all__ = ["ChatFrame"]

# Characters that no language uses; the first that stands in no text of a prompt marks where a message's content belongs.
_PRIVATE_USE = range(0xE000, 0xF8FF)


class ChatFrame:
    """What the chat template writes before the content of each message of a schema, and behind the last one.

    The template is run over messages whose contents are marks, and what comes out is cut at the marks. So it may write what it
    likes around a message, move the system message into the user's, or add one of its own. What stands before a mark is fixed
    text of the schema. What stands behind the last one depends on how the prompt goes on, and is computed with each prompt. A
    template that drops, repeats or reorders messages cannot be cut, nor one that words early messages differently because of
    later ones.

    Parameters
    ----------
    roles : sequence of Role
        The schema's messages.
    tokens : Tokens
        Has the chat template.

    Attributes
    ----------
    heads : tuple of str
        The text before the content of each message; the first begins with the BOS if the template writes it.

    Raises
    ------
    PMLError
        If there is no template, it refuses the messages, or it cannot be cut.
    """

    def __init__(self, roles: Sequence[Role], tokens: Tokens) -> None:
        self._roles = tuple(roles)
        self._tokens = tokens
        # A question is to follow. Some templates word the last answer of a chat differently.
        asked = [] if not roles or roles[-1].role == "user" else [{"role": "user", "content": "question"}]
        self.heads = self._render(asked, "")[:-1] if roles else ()

    def tail(self, text: str, messages: Sequence[Message], *, place: Place, ends_line: bool) -> str:
        """Return what stands behind the schema's last message in one prompt, up to where the answer begins.

        Parameters
        ----------
        text : str
            Text of the prompt that is in no message. It goes on with the schema's last message where that is the user's; else
            it is a user's message.
        messages : sequence of Message
            The prompt's own messages, behind it.
        place : Place
            Where the prompt stands, for messages.
        ends_line : bool
            Whether what stands before it ends with a line break or a space.

        Raises
        ------
        PMLError
            If the template refuses these messages, or words the schema's differently because of them.
        """
        more = ""
        if text and self._roles and self._roles[-1].role == "user":
            more = text if ends_line or text[0].isspace() else f"\n{text}"
        elif text:
            messages = [{"role": "user", "content": text}, *messages]
        if not self._roles:
            written = self._render(messages, "", place)[-1]
            return written.removeprefix(self._tokens.bos_text)
        *heads, tail = self._render(messages, more, place)
        for head, was, role in zip(heads, self.heads, self._roles, strict=True):
            if head != was:
                raise place.error(
                    f"with the messages of this prompt the model's chat template writes {head!r:.80} before the <{role.role}> at "
                    f"{role.place}, and {was!r:.80} without them, so its KV cannot be reused; change the order of the "
                    "messages, or write the template's words yourself, without <system>, <user> and <assistant>"
                )
        return tail

    def _render(self, messages: Sequence[Message], more: str, place: Place | None = None) -> tuple[str, ...]:
        """Return the text before each mark and, last, behind them; `more` goes on with the last message of the schema."""
        place = place or (self._roles[0].place if self._roles else Place())
        if self._tokens.chat is None:
            raise place.error(
                "<system>, <user> and <assistant> are written by the model's chat template, and its tokenizer has none; set "
                "tokenizer.chat_template, or write the words yourself, without these elements"
            )
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
        return (*cut, text)

    def _write(self, messages: list[Message], place: Place) -> str:
        assert self._tokens.chat is not None
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
