"""Positions of a schema's modules and of a prompt's tokens (Prompt Cache, sections 3.3 and 3.4)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, groupby

from cacheblend_pml.chat import ChatFrame, Tokens
from cacheblend_pml.nodes import Import, Module, Node, Param, Role, Scaffold, Text, Turn, Union, walk
from cacheblend_pml.schema import Prompt, Schema

__all__ = ["LaidOutPrompt", "Part", "Span", "SchemaLayout", "lay_out"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that follow each other without gaps and come from one place, of a schema or of a prompt.

    Those of a schema's parameter are fillers. `part` is what they are encoded with: the name of a module, or the number of an
    anonymous text or a scaffold; None for tokens of a prompt that are computed: new text, arguments, the BOS. In a prompt those
    that are not begin at `row` of their part.
    """

    token_ids: tuple[int, ...]
    position: int
    module: str | None = None
    param: Param | None = None
    text: str = ""
    part: int | str | None = None
    row: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.position + len(self.token_ids)

    @property
    def extent(self) -> range:
        """The positions of the tokens."""
        return range(self.position, self.stop)

    @property
    def is_cached(self) -> bool:
        """Whether the tokens are served from KV."""
        return self.part is not None


@dataclass(frozen=True)
class Part:
    """Tokens that are encoded together and apart from all others, and whose KV is kept.

    A part is the own tokens of one module, those of the modules nested in it being parts of their own; an anonymous text, named
    ``"#1"``, ``"#2"`` ... in reading order; or what a prompt imports of a scaffold, named by what is in it, joined by ``"+"``.
    Its tokens stand in order of their `positions` in the schema, between which other modules may leave gaps. The rows of its
    `slots` are fillers, whose positions the tokens of arguments take over.
    """

    name: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[range, ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """Whether its tokens follow each other without gaps."""
        return self.positions[-1] - self.positions[0] == len(self.positions) - 1


@dataclass(frozen=True)
class LaidOutPrompt:
    """A prompt as the model reads it.

    The segments stand in order of position and do not overlap; none is empty. The first one holds the BOS, where the tokenizer
    has one. The last one is computed, unless the prompt ends with a module and there is no chat template. Rows of a part that
    no segment takes are filler tokens.
    """

    segments: tuple[Span, ...]
    parts: dict[int | str, Part]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in order."""
        return _token_ids(self.segments)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each token, ascending."""
        return _positions(self.segments)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that are served from KV."""
        return sum(len(segment) for segment in self.segments if segment.is_cached)


class SchemaLayout:
    """A schema in the tokens of one model, with a position for each token.

    Positions count on in reading order, after the BOS. The members of a union share their first position, and what stands
    after the union starts after its largest member. A module that is nested in another one stands where it is written, between
    the other's own texts. A parameter takes as many positions as it is long.

    `spans` are all texts and parameters that have tokens, in reading order; `extents` the positions of each module with all that
    is nested in it; `size` is the position after the last one. `PMLError` if the chat template cannot be used with the schema's
    messages.
    """

    def __init__(self, schema: Schema, tokens: Tokens) -> None:
        self.schema = schema
        self.tokens = tokens
        self.frame = ChatFrame(schema.roles, tokens)
        self.spans: list[Span] = []
        self.extents: dict[str, range] = {}
        self._anonymous = count(1)
        self._scaffolds: dict[int | str, Scaffold] = {}
        nodes = _without_roles(schema.children, iter(self.frame.heads))
        self.size = self._walk(nodes, len(tokens.bos_ids), None, None)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts that are encoded when the schema is loaded, in order of position.

        A scaffold that holds a union is left out: which of its members are encoded together is known with the prompt.
        """
        waiting = {
            number
            for number, scaffold in self._scaffolds.items()
            if any(isinstance(node, Union) for node, _ in walk(scaffold.children))
        }
        return tuple(self.parts_of(span for span in self.spans if span.part not in waiting).values())

    def parts_of(self, spans: Iterable[Span]) -> dict[int | str, Part]:
        """Return the parts that these spans make up, in order of position."""
        groups: dict[int | str, list[Span]] = {}
        for span in spans:
            assert span.part is not None
            groups.setdefault(span.part, []).append(span)
        made = {key: self._part(key, group) for key, group in groups.items()}
        return dict(sorted(made.items(), key=lambda each: each[1].positions[0]))

    def _part(self, key: int | str, spans: Sequence[Span]) -> Part:
        slots: list[range] = []
        row = 0
        for span in spans:
            if span.param is not None:
                slots.append(range(row, row + len(span)))
            row += len(span)
        names = dict.fromkeys(span.module for span in spans if span.module is not None)
        return Part("+".join(names) or f"#{key}", _token_ids(spans), _positions(spans), tuple(slots))

    def _walk(self, nodes: Iterable[Node], position: int, module: str | None, part: int | str | None) -> int:
        """Add the spans of `nodes` from `position` on; return the position after them."""
        for node in nodes:
            if isinstance(node, Text):
                ids = self._ids(node.text, position)
                if ids:
                    key = next(self._anonymous) if part is None else part
                    self.spans.append(Span(ids, position, module, text=node.text, part=key))
                position += len(ids)
            elif isinstance(node, Param):
                fillers = (self.tokens.filler_id,) * node.length
                self.spans.append(Span(fillers, position, module, node, part=part))
                position += node.length
            elif isinstance(node, Module):
                # In a scaffold everything is encoded together; elsewhere each module for itself.
                stop = self._walk(node.children, position, node.name, part if part in self._scaffolds else node.name)
                self.extents[node.name] = range(position, stop)
                position = stop
            elif isinstance(node, Union):
                position = max(self._walk([member], position, module, part) for member in node.children)
            elif isinstance(node, Scaffold):
                number = next(self._anonymous)
                self._scaffolds[number] = node
                position = self._walk(node.children, position, module, number)
        return position

    def _ids(self, text: str, position: int) -> tuple[int, ...]:
        ids = self.tokens.tokenize(text)
        bos = self.tokens.bos_ids
        # The BOS has its own place before the schema; chat templates write it as well.
        return ids[len(bos) :] if bos and position == len(bos) and ids[: len(bos)] == bos else ids


def _token_ids(spans: Iterable[Span]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(span.token_ids for span in spans))


def _positions(spans: Iterable[Span]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(span.extent for span in spans))


def _without_roles(nodes: Iterable[Node], heads: Iterator[str]) -> Iterator[Node]:
    """The children of a schema with messages as the template writes them; texts that meet become one."""

    def spread() -> Iterator[Node]:
        for node in nodes:
            if isinstance(node, Role):
                yield Text(next(heads), node.place)
                yield from node.children
            elif isinstance(node, Scaffold):
                yield replace(node, children=tuple(_without_roles(node.children, heads)))
            else:
                yield node

    for is_text, group in groupby(spread(), lambda node: isinstance(node, Text)):
        if is_text:
            texts = [node for node in group if isinstance(node, Text)]
            yield replace(texts[0], text="".join(each.text for each in texts))
        else:
            yield from group


def lay_out(layout: SchemaLayout, prompt: Prompt) -> LaidOutPrompt:
    """Give every token of a prompt its position.

    Imported modules and the anonymous texts keep the positions that they have in the schema. An argument takes the first
    positions of its parameter's slot, and the others of the slot hold nothing. New text after the last import stands after
    everything. New text before that takes the first free positions after the import before it: those of modules that are not
    imported, or what a union's member leaves of the union's size. What does not fit is a `PMLError` that says by how many tokens.
    """
    if prompt.schema != layout.schema:
        raise prompt.place.error(
            f"the prompt is for schema {prompt.schema.name!r}, and this is the layout of {layout.schema.name!r}"
            + (", as it was before a change" if prompt.schema.name == layout.schema.name else "")
        )
    used = [span for span in layout.spans if span.module is None or span.module in prompt.imports]
    parts = layout.parts_of(used)
    rows = dict.fromkeys(parts, 0)
    segments = [Span(layout.tokens.bos_ids, 0)]
    for span in used:
        assert span.part is not None
        if span.param is None:
            segments.append(replace(span, row=rows[span.part]))
        else:
            segments.append(replace(span, part=None, token_ids=_argument(layout, prompt, span, span.param)))
        rows[span.part] += len(span)
    gaps = _Gaps(layout, used)
    gaps.fill(prompt.children[: prompt.body_length], len(layout.tokens.bos_ids), None)
    segments += [*gaps.texts, _tail(layout, prompt, used, gaps.end)]
    segments.sort(key=lambda segment: segment.position)
    return LaidOutPrompt(tuple(segment for segment in segments if segment.token_ids), parts)


def _argument(layout: SchemaLayout, prompt: Prompt, span: Span, param: Param) -> tuple[int, ...]:
    assert span.module is not None
    given = prompt.imports[span.module]
    text = given.arguments[param.name]
    ids = layout.tokens.tokenize(layout.tokens.said(text))
    if len(ids) > param.length:
        raise given.place.error(
            f"the argument {param.name}={text!r:.60} of module {span.module!r} has {len(ids)} tokens, "
            f"{len(ids) - param.length} more than the {param.length} of its parameter; shorten it, or give the parameter a "
            f'len of "{len(ids)}"'
        )
    return ids


def _tail(layout: SchemaLayout, prompt: Prompt, used: Sequence[Span], position: int) -> Span:
    """Return the last span: the prompt's last text, its messages, the template's words before the answer."""
    after = prompt.children[prompt.body_length :]
    text = "".join(node.text for node in after if isinstance(node, Text))
    turns = [node for node in after if isinstance(node, Turn)]
    if turns or layout.schema.roles:
        place = next((node.place for node in [*turns, *after] if isinstance(node, Turn | Text)), prompt.place)
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        text = layout.frame.tail(text, messages, place, ends_line=not used or used[-1].text[-1:].isspace())
    return Span(layout.tokens.tokenize(text), position)


class _Gaps:
    """The positions of one prompt that are free, and the new text that was put there."""

    def __init__(self, layout: SchemaLayout, used: Sequence[Span]) -> None:
        self._layout = layout
        # Half-open, ascending, not overlapping; new text is added as it finds its place.
        self._taken = [(span.position, span.stop) for span in used]
        self._own_stop = {span.module: span.stop for span in used}
        self.texts: list[Span] = []

    @property
    def end(self) -> int:
        """The position after all that is taken."""
        return max((stop for _, stop in self._taken), default=len(self._layout.tokens.bos_ids))

    def fill(self, nodes: Sequence[object], cursor: int, parent: str | None) -> int:
        """Place the new text among `nodes` from `cursor` on; return where all of them end."""
        end = cursor
        after: str | None = None
        for number, node in enumerate(nodes):
            if isinstance(node, Text):
                following = next((each.name for each in nodes[number + 1 :] if isinstance(each, Import)), None)
                cursor = self._put(node, cursor, after, following, parent)
            elif isinstance(node, Import):
                after = node.name
                start = self._layout.extents[node.name].start
                cursor = max(self.fill(node.children, start, node.name), self._own_stop.get(node.name, start))
            # Imports may stand in another order than the schema's.
            end = max(end, cursor)
        return end

    def _put(self, node: Text, cursor: int, after: str | None, following: str | None, parent: str | None) -> int:
        ids = self._layout.tokens.tokenize(node.text)
        if not ids:
            return cursor
        extents = self._layout.extents
        start, limits = self._gap(cursor)
        if parent is not None:
            limits.append(extents[parent].stop)
        if following is not None and extents[following].start >= cursor:
            limits.append(extents[following].start)
        free = max(0, min(limits) - start) if limits else len(ids)
        if len(ids) > free:
            where = "before the first import" if after is None else f"after module {after!r}"
            if following is not None:
                where += f" and before module {following!r}"
            if parent is not None:
                where = f"in module {parent!r}, {where}"
            raise node.place.error(
                f"the text {node.text.strip()!r:.60} has {len(ids)} tokens, {len(ids) - free} more than the {free} positions "
                f"that are free {where}; shorten it, put it after the last import, or give a module a parameter to hold it"
            )
        self.texts.append(Span(ids, start))
        bisect.insort(self._taken, (start, start + len(ids)))
        return start + len(ids)

    def _gap(self, cursor: int) -> tuple[int, list[int]]:
        """The first free position from `cursor` on, and the taken one that ends the gap, if any does."""
        start = cursor
        for taken, stop in self._taken:
            if taken > start:
                return start, [taken]
            start = max(start, stop)
        return start, []
