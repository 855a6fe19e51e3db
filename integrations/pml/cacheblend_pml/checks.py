"""Checks of schemas and prompts: what nodes cannot know of each other, and the names and lengths of those made in Python."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from cacheblend_pml.nodes import (
    MAX_DEPTH,
    ROLES,
    Import,
    Module,
    Node,
    Param,
    Place,
    PromptNode,
    Role,
    Scaffold,
    Text,
    Turn,
    Union,
    walk,
)

__all__ = ["check_prompt", "check_schema", "walk_imports"]

_MAX_PARAM_LENGTH = 100_000


def check_schema(name: str, children: Sequence[Node], source: str | None) -> None:
    """Raise `PMLError` for what nodes cannot know of each other, and for names and lengths of nodes made in Python."""
    if not children:
        raise Place(source).error(f"schema {name!r} is empty; put text or modules into it")
    modules: dict[str, Module] = {}
    messages: list[Role] = []
    for node, above in walk(children):
        if len(above) >= MAX_DEPTH:
            raise node.place.error(f"the schema is nested deeper than {MAX_DEPTH}; flatten it")
        if isinstance(node, Param):
            _check_param(node, above)
        elif isinstance(node, Module):
            if not isinstance(node.name, str) or not node.name.strip():
                raise node.place.error(f"{node.name!r:.60} cannot name a module; give a text that is not blank")
            twin = modules.setdefault(node.name, node)
            if twin is not node:
                raise node.place.error(
                    f"there is a module {node.name!r} already, at {twin.place}; give each a name of its own in the whole schema"
                )
        elif isinstance(node, Role):
            if node.role not in ROLES or not all(isinstance(each, Scaffold) for each in above):
                raise node.place.error(
                    f"the message of role {node.role!r} stands in something else; give {', '.join(ROLES)} at the schema's top"
                )
            messages.append(node)
        elif isinstance(node, Scaffold) and any(isinstance(each, Scaffold) for each in above):
            raise node.place.error(
                "a scaffold stands in another one, where everything is encoded together anyway; leave it out"
            )
        if isinstance(node, Module | Union | Scaffold) and not any(
            not isinstance(child, Text) or child.text for child in node.children
        ):
            raise node.place.error(f"the {_called(node)} is empty; put something into it, or leave it out")
    if messages:
        first = messages[0]
        for node, above in walk(children):
            if not isinstance(node, Role | Scaffold) and all(isinstance(each, Scaffold) for each in above):
                raise node.place.error(
                    f"the {_called(node)} stands outside of the messages, and a chat template knows no words there; put it into "
                    f"one of them, such as the <{first.role}> at {first.place}"
                )


def _check_param(node: Param, above: Sequence[Node]) -> None:
    owner = next((each for each in reversed(above) if not isinstance(each, Scaffold)), None)
    if not isinstance(owner, Module):
        raise node.place.error(
            f"parameter {node.name!r} stands in no module; put a <module> around it, which prompts import"
        )
    if not isinstance(node.length, int) or not 1 <= node.length <= _MAX_PARAM_LENGTH:
        raise node.place.error(
            f"parameter {node.name!r} has the length {node.length!r:.40}; give it from 1 to {_MAX_PARAM_LENGTH} tokens"
        )
    twin = next(each for each in owner.params if each.name == node.name)
    if twin is not node:
        raise node.place.error(
            f"module {owner.name!r} has a parameter {node.name!r} already, at {twin.place}; give each a name of its own"
        )


def _called(node: Node) -> str:
    what = getattr(node, "name", None) or (node.text.strip() if isinstance(node, Text) else "")
    return f"{type(node).__name__.lower()} {what!r:.60}" if what else type(node).__name__.lower()


def walk_imports(nodes: Sequence[PromptNode], parent: str | None = None) -> Iterator[tuple[Import, str | None]]:
    """Yield every import with the name of the one that it stands in."""
    for node in nodes:
        if isinstance(node, Import):
            yield node, parent
            yield from walk_imports(node.children, node.name)


def check_prompt(
    children: Sequence[PromptNode],
    schema: str,
    modules: Mapping[str, Module],
    parents: Mapping[str, str | None],
    unions: Sequence[Sequence[str]],
) -> None:
    """Raise `PMLError` if what a prompt consists of does not fit the schema of a name, with these modules."""
    taken: dict[str, Import] = {}
    for node, parent in walk_imports(children):
        if node.name not in modules:
            near = difflib.get_close_matches(str(node.name), modules, n=8, cutoff=0)
            raise node.place.error(
                f"schema {schema!r} has no module {node.name!r:.60}; it has {', '.join(near) or 'none'}"
            )
        owner = parents[node.name]
        if owner != parent:
            where = (
                f"nested in module {owner!r}; import it inside of that"
                if owner
                else "in no module; import it by itself"
            )
            raise node.place.error(f"module {node.name!r} is {where}")
        if node.name in taken:
            raise node.place.error(
                f"module {node.name!r} was imported at {taken[node.name].place}; a prompt imports a module once"
            )
        for union in unions:
            other = next((name for name in union if name in taken and node.name in union), None)
            if other is not None:
                raise node.place.error(
                    f"module {node.name!r} and module {other!r} are members of one union, of which a prompt imports one at most; "
                    "leave one of them out"
                )
        taken[node.name] = node
        _check_arguments(node, modules[node.name])
    turn: Turn | None = None
    for child in children:
        if not isinstance(child, Turn):
            if turn is not None:
                raise child.place.error(
                    f"text or an import stands after the <{turn.role}> at {turn.place}; a prompt's own messages come last"
                )
        elif child.role not in ROLES:
            raise child.place.error(f"unknown role {child.role!r}; take one of {', '.join(ROLES)}")
        else:
            turn = child


def _check_arguments(node: Import, module: Module) -> None:
    params = {param.name: param.length for param in module.params}
    for name, value in node.arguments.items():
        if name not in params:
            raise node.place.error(
                f"module {node.name!r} has no parameter {name!r:.60}; it has {', '.join(params) or 'none'}"
            )
        if not isinstance(value, str):
            raise node.place.error(f"the argument for {name!r} of module {node.name!r} is {value!r:.40}; give a text")
    missing = [name for name in params if name not in node.arguments]
    for name in missing[:1]:
        raise node.place.error(
            f"module {node.name!r} has the parameter {name!r}, for which the import has no argument; write "
            f'{name}="..." with at most {params[name]} tokens, or {name}="" to leave it out'
        )
