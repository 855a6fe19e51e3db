"""Where the tokens of a prompt stand (Prompt Cache, section 3.4)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from cacheblend_rag.pml.layout import Piece, SchemaLayout
from cacheblend_rag.pml.nodes import Param
from cacheblend_rag.pml.parts import LaidOutPrompt, PromptSegment
from cacheblend_rag.pml.prompt import Import, NewText, Prompt, PromptNode, Turn

__all__ = ["lay_out"]


def lay_out(layout: SchemaLayout, prompt: Prompt) -> LaidOutPrompt:
    """Give every token of a prompt its position.

    Imported modules and the anonymous texts keep the positions that they have in the schema. An argument takes the first
    positions of its parameter's slot, and the others of the slot hold nothing. New text behind the last import stands behind
    everything. New text before that takes the first free positions behind the import before it: those of modules that are not
    imported, or what a union's member leaves of the union's size.

    Parameters
    ----------
    layout : SchemaLayout
        The schema, in the tokens of the model.
    prompt : Prompt
        A prompt for that schema.

    Returns
    -------
    LaidOutPrompt
        Its segments.

    Raises
    ------
    PMLError
        If the prompt is for another schema; if an argument is longer than its parameter, or new text longer than the gap it
        stands in: the message says by how many tokens; if the chat template cannot be used with the prompt's messages.
    """
    if prompt.schema != layout.schema:
        raise prompt.place.error(
            f"the prompt is for schema {prompt.schema.name!r}, and this is the layout of {layout.schema.name!r}"
            + (", as it was before a change" if prompt.schema.name == layout.schema.name else "")
        )
    return _Placing(layout, prompt).lay_out()


class _Placing:
    """The placing of one prompt: which positions are taken, and what was put there."""

    def __init__(self, layout: SchemaLayout, prompt: Prompt) -> None:
        self._layout = layout
        self._prompt = prompt
        self._used = layout.used(prompt.imports)
        # Half-open, ascending, not overlapping; new text is added as it finds its place.
        self._taken = [(piece.position, piece.stop) for piece in self._used]
        self._texts: list[PromptSegment] = []
        self._own_stop = {piece.module: piece.stop for piece in self._used}

    def lay_out(self) -> LaidOutPrompt:
        """Return the placed prompt."""
        bos = self._layout.tokens.bos_ids
        numbered = self._layout.numbered_parts(self._used)
        index = {number: place for place, (number, _) in enumerate(numbered)}
        segments = [PromptSegment(bos, 0), *self._served(index)]
        body, text, turns = _split(self._prompt.children)
        self._place(body, len(bos), None)
        segments += self._texts
        segments.append(self._tail(text, turns))
        segments.sort(key=lambda segment: segment.position)
        return LaidOutPrompt(
            tuple(segment for segment in segments if segment.token_ids), tuple(part for _, part in numbered)
        )

    def _served(self, index: dict[int, int]) -> Iterator[PromptSegment]:
        """The segments of imported modules and anonymous texts, with the arguments in their slots."""
        rows = dict.fromkeys(index, 0)
        for piece in self._used:
            row = rows[piece.part]
            rows[piece.part] += len(piece.token_ids)
            if piece.param is None:
                yield PromptSegment(piece.token_ids, piece.position, index[piece.part], row, piece.module)
            else:
                ids = self._argument(piece, piece.param)
                yield PromptSegment(ids, piece.position, module=piece.module, parameter=piece.param.name)

    def _argument(self, piece: Piece, param: Param) -> tuple[int, ...]:
        assert piece.module is not None
        given = self._prompt.imports[piece.module]
        text = given.arguments[param.name]
        ids = self._layout.tokens.tokenize(text) if text else ()
        if len(ids) > param.length:
            raise given.place.error(
                f"the argument {param.name}={text!r:.60} of module {piece.module!r} has {len(ids)} tokens, "
                f"{len(ids) - param.length} more than the {param.length} of its parameter; shorten it, or give the parameter a "
                f'len of "{len(ids)}"'
            )
        return ids

    def _place(self, children: Sequence[Import | NewText], cursor: int, parent: str | None) -> int:
        """Place the new text among `children` from `cursor` on; return where all of them end."""
        end = cursor
        for number, node in enumerate(children):
            if isinstance(node, NewText):
                following = next((each for each in children[number + 1 :] if isinstance(each, Import)), None)
                cursor = self._place_text(node, cursor, children[:number], following, parent)
            else:
                start = self._layout.extents[node.name].start
                inner = self._place(_texts_and_imports(node.children), start, node.name)
                cursor = max(inner, self._own_stop.get(node.name, start))
            # Imports may stand in another order than the schema's.
            end = max(end, cursor)
        return end

    def _place_text(
        self, node: NewText, cursor: int, before: Sequence[object], following: Import | None, parent: str | None
    ) -> int:
        ids = self._layout.tokens.tokenize(node.text) if node.text else ()
        if not ids:
            return cursor
        limits = [self._layout.extents[parent].stop] if parent is not None else []
        if following is not None and self._layout.extents[following.name].start >= cursor:
            limits.append(self._layout.extents[following.name].start)
        start, stop = self._gap(cursor)
        if limits:
            stop = min(limits) if stop is None else min(stop, *limits)
        free = len(ids) if stop is None else max(0, stop - start)
        if len(ids) > free:
            behind = next((each.name for each in reversed(list(before)) if isinstance(each, Import)), None)
            raise node.place.error(
                f"the text {node.text.strip()!r:.60} has {len(ids)} tokens, {len(ids) - free} more than the {free} positions "
                f"that are free {_where(behind, following, parent)}; shorten it, put it behind the last import, or give a module "
                "a parameter to hold it"
            )
        self._texts.append(PromptSegment(ids, start))
        bisect.insort(self._taken, (start, start + len(ids)))
        return start + len(ids)

    def _gap(self, cursor: int) -> tuple[int, int | None]:
        """The first free position from `cursor` on, and the taken one that ends the gap, if any does."""
        start = cursor
        for taken, stop in self._taken:
            if taken > start:
                return start, taken
            start = max(start, stop)
        return start, None

    def _tail(self, text: NewText | None, turns: Sequence[Turn]) -> PromptSegment:
        """What stands behind everything: the prompt's last text, its messages, the template's words before the answer."""
        written = text.text if text is not None else ""
        last = self._used[-1] if self._used else None
        if turns or self._layout.schema.roles:
            written = self._layout.frame.tail(
                written,
                [{"role": turn.role, "content": turn.text} for turn in turns],
                place=turns[0].place if turns else text.place if text is not None else self._prompt.place,
                ends_line=last is None or last.ends_line,
            )
        start = max((stop for _, stop in self._taken), default=len(self._layout.tokens.bos_ids))
        return PromptSegment(self._layout.tokens.tokenize(written) if written else (), start)


def _split(children: Sequence[PromptNode]) -> tuple[list[Import | NewText], NewText | None, list[Turn]]:
    """A prompt's children up to the last import; the text behind it; the messages."""
    turns = [node for node in children if isinstance(node, Turn)]
    body = _texts_and_imports(children)
    last = max((number for number, node in enumerate(body) if isinstance(node, Import)), default=-1)
    texts = [node for node in body[last + 1 :] if isinstance(node, NewText)]
    if not texts:
        return body, None, turns
    return body[: last + 1], NewText("".join(each.text for each in texts), texts[0].place), turns


def _texts_and_imports(children: Sequence[object]) -> list[Import | NewText]:
    return [node for node in children if isinstance(node, Import | NewText)]


def _where(behind: str | None, following: Import | None, parent: str | None) -> str:
    where = f"behind module {behind!r}" if behind is not None else "before the first import"
    if following is not None:
        where = f"{where} and before module {following.name!r}"
    return where if parent is None else f"in module {parent!r}, {where}"
