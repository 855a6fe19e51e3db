"""What a schema must fulfil, however it was made."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cacheblend_rag.pml.nodes import (
    MAX_DEPTH,
    MAX_PARAM_LENGTH,
    ROLES,
    Module,
    Node,
    Param,
    Place,
    Role,
    Scaffold,
    SchemaTree,
    Text,
    Union,
    inside,
)

__all__ = ["check_schema"]

_PARAM_NAME = re.compile(r"[^\W\d][\w.-]*")
_MAX_NAME_LENGTH = 200


def check_schema(schema: SchemaTree) -> None:
    """See that a schema means something.

    Parameters
    ----------
    schema : SchemaTree
        The schema.

    Raises
    ------
    PMLError
        If two modules have one name, or two parameters of a module; if a name, a length or a nesting has no meaning; if a module,
        a union or the schema is empty; if there are messages, and something stands outside of them.
    """
    place = Place(schema.source)
    if not isinstance(schema.name, str) or not schema.name.strip():
        raise place.error(f"the schema's name is {schema.name!r}; give it a name")
    if not schema.children:
        raise place.error(f"schema {schema.name!r} is empty; put text or modules into it")
    _Checker().check(schema.children, (), 1)
    _check_messages(schema.children)


class _Checker:
    """One walk over a schema; remembers the names it has seen."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}

    def check(self, nodes: Sequence[Node], above: tuple[Node, ...], depth: int) -> None:
        """Check `nodes`, which stand in the last one of `above`."""
        for node in nodes:
            if depth > MAX_DEPTH:
                raise node.place.error(f"the schema is nested deeper than {MAX_DEPTH}; flatten it")
            if isinstance(node, Text):
                self._check_text(node)
            elif isinstance(node, Param):
                self._check_param(node, above)
            elif isinstance(node, Module):
                self._check_module(node)
            elif isinstance(node, Union):
                self._check_union(node)
            elif isinstance(node, Scaffold):
                self._check_scaffold(node, above)
            elif isinstance(node, Role):
                self._check_role(node, above)
            else:
                raise Place().error(
                    f"a schema holds {node!r:.40}, a {type(node).__name__}, which is no node of a schema"
                )
            self.check(inside(node), (*above, node), depth + 1)

    def _check_text(self, node: Text) -> None:
        if not isinstance(node.text, str):
            raise node.place.error(f"a text is the {type(node.text).__name__} {node.text!r:.40}; give a string")

    def _check_param(self, node: Param, above: tuple[Node, ...]) -> None:
        owner = next((each for each in reversed(above) if not isinstance(each, Scaffold)), None)
        if not isinstance(owner, Module):
            raise node.place.error(
                f"parameter {node.name!r} stands in no module; a prompt gives arguments to the modules that it imports, so put a "
                "<module> around it"
            )
        if not isinstance(node.name, str) or not _PARAM_NAME.fullmatch(node.name):
            raise node.place.error(
                f"{node.name!r:.60} is no name for a parameter; it begins with a letter or _, and has letters, digits, _, - and ."
            )
        if not isinstance(node.length, int) or not 1 <= node.length <= MAX_PARAM_LENGTH:
            raise node.place.error(
                f"parameter {node.name!r} has the length {node.length!r:.40}; give the most tokens an argument may have, from 1 "
                f"to {MAX_PARAM_LENGTH}"
            )
        twin = next(each for each in owner.params if each.name == node.name)
        if twin is not node:
            raise node.place.error(
                f"module {owner.name!r} has a parameter {node.name!r} already, at {twin.place}; give each a name of its own"
            )

    def _check_module(self, node: Module) -> None:
        if not isinstance(node.name, str) or not node.name.strip() or len(node.name) > _MAX_NAME_LENGTH:
            raise node.place.error(
                f"{node.name!r:.60} is no name for a module; give 1 to {_MAX_NAME_LENGTH} characters, not all of them blank"
            )
        if node.name in self._modules:
            raise node.place.error(
                f"there is a module {node.name!r} already, at {self._modules[node.name].place}; prompts import modules by name, "
                "so each needs a name of its own in the whole schema"
            )
        self._modules[node.name] = node
        if not any(not isinstance(child, Text) or child.text for child in node.children):
            raise node.place.error(f"module {node.name!r} is empty; put text into it, or leave it out")

    def _check_union(self, node: Union) -> None:
        if not node.members:
            raise node.place.error("the union is empty; put modules into it")
        for member in node.members:
            if not isinstance(member, Module):
                raise member.place.error("only modules stand in a union; put it into one of them, or out of the union")

    def _check_scaffold(self, node: Scaffold, above: tuple[Node, ...]) -> None:
        if not node.children:
            raise node.place.error("the scaffold is empty; put modules into it")
        outer = next((each for each in above if isinstance(each, Scaffold)), None)
        if outer is not None:
            raise node.place.error(
                f"the scaffold stands in the one at {outer.place}; all that is in a scaffold is encoded together anyway"
            )

    def _check_role(self, node: Role, above: tuple[Node, ...]) -> None:
        if node.role not in ROLES:
            raise node.place.error(f"{node.role!r} is no role; take one of {', '.join(ROLES)}")
        owner = next((each for each in above if not isinstance(each, Scaffold)), None)
        if owner is not None:
            raise node.place.error(
                f"<{node.role}> stands in {_called(owner)}; messages stand at the schema's top, and modules in them, since a "
                "chat template must see every message"
            )


def _check_messages(nodes: Sequence[Node]) -> None:
    top = [each for node in nodes for each in (node.children if isinstance(node, Scaffold) else (node,))]
    first = next((node for node in top if isinstance(node, Role)), None)
    if first is None:
        return
    for node in top:
        if not isinstance(node, Role):
            raise node.place.error(
                f"{_called(node)} stands outside of the messages; this schema has <{first.role}> at {first.place}, and a chat "
                "template knows no words outside of messages: put it into one of them"
            )


def _called(node: Node) -> str:
    if isinstance(node, Module):
        return f"module {node.name!r}"
    if isinstance(node, Role):
        return f"<{node.role}>"
    return {Text: "text", Param: "a parameter", Union: "a union", Scaffold: "a scaffold"}[type(node)]
