"""Where the modules of a schema stand (Prompt Cache, section 3.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cacheblend_rag.pml.chat import ChatFrame
from cacheblend_rag.pml.nodes import Module, Node, Param, Role, Scaffold, SchemaTree, Text, Union
from cacheblend_rag.pml.parts import Part, Slot
from cacheblend_rag.pml.tokens import Tokens

__all__ = ["Extent", "Piece", "SchemaLayout"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A text or a parameter of a schema, in tokens, at its positions.

    Attributes
    ----------
    token_ids : tuple of int
        Its tokens; a parameter's are fillers.
    position : int
        The position of the first one.
    part : int
        The number of the part it is encoded with.
    module : str or None
        The module it belongs to; None for anonymous text.
    param : Param or None
        The parameter, if it is one.
    text : str
        The text, if it is one.
    """

    token_ids: tuple[int, ...]
    position: int
    part: int
    module: str | None
    param: Param | None = None
    text: str = ""

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.position + len(self.token_ids)

    @property
    def ends_line(self) -> bool:
        """Whether it ends with white space."""
        return self.text[-1:].isspace()


@dataclass(frozen=True, slots=True)
class Extent:
    """The half-open range of positions that a module takes, with all that is nested in it."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class SchemaLayout:
    """A schema in the tokens of one model, with a position for each token.

    Positions count on in reading order, from behind the BOS. The members of a union share their first position, and what stands
    behind the union starts behind its largest member. A module that is nested in another one stands where it is written, between
    the other's own texts. A parameter takes as many positions as it is long.

    Parameters
    ----------
    schema : SchemaTree
        The schema.
    tokens : Tokens
        The model's tokenizer.

    Attributes
    ----------
    schema, tokens
        What it was made of.
    frame : ChatFrame
        The words of the model's chat template.
    pieces : tuple of Piece
        Every text and parameter that has tokens, in reading order.
    extents : dict of str to Extent
        The range of each module.
    reading_order : tuple of (str or Piece)
        The names of all modules and the pieces of anonymous text, a module before what is nested in it.
    size : int
        The position behind the last one.

    Raises
    ------
    PMLError
        If the chat template cannot be used with the schema's messages.
    """

    def __init__(self, schema: SchemaTree, tokens: Tokens) -> None:
        self.schema = schema
        self.tokens = tokens
        self.frame = ChatFrame(schema.roles, tokens)
        self.extents: dict[str, Extent] = {}
        self._order: list[str | Piece] = []
        self._scaffolds: dict[int, Scaffold] = {}
        self._anonymous: dict[int, str] = {}
        self._parts = 0
        pieces: list[Piece] = []
        nodes = tuple(_without_roles(schema.children, iter(self.frame.heads)))
        self.size = self._walk(nodes, len(tokens.bos_ids), None, None, pieces)
        self.pieces = tuple(pieces)
        self.reading_order = tuple(self._order)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What is encoded when the schema is loaded, in order of position.

        A scaffold that holds a union is left out: which of its members are encoded together is known with the prompt.
        """
        return self.parts_of(
            piece
            for piece in self.pieces
            if piece.part not in self._scaffolds or not _has_union(self._scaffolds[piece.part].children)
        )

    def used(self, imported: Collection[str]) -> tuple[Piece, ...]:
        """Return the pieces of a prompt that imports these modules, ascending."""
        return tuple(piece for piece in self.pieces if piece.module is None or piece.module in imported)

    def parts_of(self, pieces: Iterable[Piece]) -> tuple[Part, ...]:
        """Return the parts that these pieces make up, by their first positions."""
        return tuple(part for _, part in self.numbered_parts(pieces))

    def numbered_parts(self, pieces: Iterable[Piece]) -> list[tuple[int, Part]]:
        """Return the parts that these pieces make up, each with its number in `Piece.part`, by their first positions."""
        groups: dict[int, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.part, []).append(piece)
        made = [(number, self._part(number, group)) for number, group in groups.items()]
        return sorted(made, key=lambda each: (each[1].start, each[0]))

    def _part(self, number: int, pieces: list[Piece]) -> Part:
        is_scaffold = number in self._scaffolds
        ids: list[int] = []
        positions: list[int] = []
        slots: list[Slot] = []
        for piece in pieces:
            if piece.param is not None:
                assert piece.module is not None
                slots.append(Slot(piece.module, piece.param.name, len(ids), len(ids) + len(piece.token_ids)))
            ids.extend(piece.token_ids)
            positions.extend(range(piece.position, piece.stop))
        names = list(dict.fromkeys(piece.module for piece in pieces if piece.module is not None))
        name = "+".join(names) if names else self._anonymous[number]
        return Part(name, tuple(ids), tuple(positions), tuple(slots), is_scaffold)

    def _walk(
        self, nodes: Iterable[Node], position: int, module: str | None, part: int | None, pieces: list[Piece]
    ) -> int:
        """Add the pieces of `nodes` from `position` on; return the position behind them."""
        for node in nodes:
            if isinstance(node, Text):
                ids = self._ids(node.text, position)
                if ids:
                    number = self._next_anonymous() if part is None else part
                    pieces.append(Piece(ids, position, number, module, text=node.text))
                    if module is None:
                        self._order.append(pieces[-1])
                position += len(ids)
            elif isinstance(node, Param):
                assert part is not None
                fillers = (self.tokens.filler_id,) * node.length
                pieces.append(Piece(fillers, position, part, module, node))
                position += node.length
            elif isinstance(node, Module):
                position = self._walk_module(node, position, part, pieces)
            elif isinstance(node, Union):
                position = max(self._walk_module(member, position, part, pieces) for member in node.members)
            elif isinstance(node, Scaffold):
                number = self._next_anonymous()
                self._scaffolds[number] = node
                position = self._walk(node.children, position, module, number, pieces)
        return position

    def _walk_module(self, node: Module, position: int, part: int | None, pieces: list[Piece]) -> int:
        # In a scaffold everything is encoded together; elsewhere each module for itself.
        number = part if part in self._scaffolds else self._next_part()
        self._order.append(node.name)
        stop = self._walk(node.children, position, node.name, number, pieces)
        self.extents[node.name] = Extent(position, stop)
        return stop

    def _ids(self, text: str, position: int) -> tuple[int, ...]:
        ids = self.tokens.tokenize(text) if text else ()
        bos = self.tokens.bos_ids
        # The BOS has its own place before the schema; chat templates write it as well.
        return ids[len(bos) :] if bos and position == len(bos) and ids[: len(bos)] == bos else ids

    def _next_anonymous(self) -> int:
        number = self._next_part()
        self._anonymous[number] = f"#{len(self._anonymous) + 1}"
        return number

    def _next_part(self) -> int:
        self._parts += 1
        return self._parts


def _without_roles(nodes: Iterable[Node], heads: Iterator[str]) -> Iterator[Node]:
    """The children of a schema with messages as the template writes them; texts that meet become one."""
    text: Text | None = None
    for node in _spread(nodes, heads):
        if isinstance(node, Text):
            text = node if text is None else replace(text, text=text.text + node.text)
            continue
        if text is not None:
            yield text
            text = None
        yield (
            replace(node, children=tuple(_without_roles(node.children, heads))) if isinstance(node, Scaffold) else node
        )
    if text is not None:
        yield text


def _spread(nodes: Iterable[Node], heads: Iterator[str]) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, Role):
            yield Text(next(heads), node.place)
            yield from node.children
        else:
            yield node


def _has_union(nodes: Iterable[Node]) -> bool:
    return any(
        isinstance(node, Union) or (isinstance(node, Module | Scaffold) and _has_union(node.children)) for node in nodes
    )
