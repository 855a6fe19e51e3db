"""A schema, and the prompts that are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.files import Files
from cacheblend_rag.pml.nodes import SchemaTree
from cacheblend_rag.pml.plan import Plan
from cacheblend_rag.pml.prompt import Import, NewText, Prompt, Turn
from cacheblend_rag.pml.read import SchemaReader, read_prompt
from cacheblend_rag.pml.template import read_template
from cacheblend_rag.pml.validate import check_schema

__all__ = ["Schema"]


@dataclass(frozen=True)
class Schema(SchemaTree):
    """A validated schema: prompt modules, where they stand to each other, and which of them exclude each other.

    Parameters
    ----------
    name : str
        Its name.
    children : sequence of Node
        What it consists of.
    source : str, optional
        Where its text came from, for messages.
    plan : Plan, optional
        If it was a template: how values choose among its modules.

    Raises
    ------
    PMLError
        If it is not valid: two modules of one name, for example.
    """

    plan: Plan | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        check_schema(self)

    @classmethod
    def from_file(cls, path: str | Path, *, root: str | Path | None = None) -> Schema:
        """Read a schema from a file.

        Parameters
        ----------
        path : str or Path
            The file, UTF-8.
        root : str or Path, optional
            The folder below which ``src=`` may name files, from which their paths count; by default the file's own.

        Returns
        -------
        Schema
            The schema.

        Raises
        ------
        PMLError
            If the file cannot be read, or the schema is wrong; the message says where.
        """
        path = Path(path)
        files = Files(path.parent if root is None else Path(root))
        text = read_text(path)
        return cls._checked(SchemaReader(files).read(text, path.name, path))

    @classmethod
    def from_text(cls, text: str, *, root: str | Path | None = None, source: str | None = None) -> Schema:
        """Read a schema from a string.

        Parameters
        ----------
        text : str
            The schema.
        root : str or Path, optional
            The folder below which ``src=`` may name files; by default no file is read.
        source : str, optional
            What the text is called in messages.

        Returns
        -------
        Schema
            The schema.

        Raises
        ------
        PMLError
            If the schema is wrong; the message says where.
        """
        files = None if root is None else Files(Path(root))
        return cls._checked(SchemaReader(files).read(text, source))

    @classmethod
    def from_template(
        cls,
        template: Any,
        *,
        name: str | None = None,
        lengths: Mapping[str, int] | None = None,
        format: str | None = None,
    ) -> Schema:
        """Turn a template into a schema, so that its fixed text is encoded once.

        The whole becomes a module, or one in each message. Variables become parameters; what stands under an ``if`` becomes a
        module; the branches of ``if`` and ``else`` the members of a union; a template called by another one a nested module.
        `fill` makes prompts of values.

        Parameters
        ----------
        template : function, str, or a prompt template of LangChain or LlamaIndex
            A function yields its texts, or returns one, and its source is read instead of being run. It may have ``if``,
            ``match`` and ``yield from`` another such function. A string is Jinja, with ``{{ name }}`` and ``{% if %}``, or has
            ``{name}`` as `str.format` knows it.
        name : str, optional
            The schema's name; by default the function's.
        lengths : mapping of str to int, optional
            The most tokens that the value of each variable may have. A function can say it by
            ``Annotated[str, MaxTokens(5)]``.
        format : str, optional
            "jinja" or "f-string", for a string.

        Returns
        -------
        Schema
            The schema.

        Raises
        ------
        PMLError
            If the template does something that no schema can say, a loop for example, or a variable has no length.
        """
        found, children, plan = read_template(template, name, lengths or {}, format)
        return cls(found, children, None, plan)

    def fill(self, values: Mapping[str, Any] | None = None, *more: Turn | str) -> Prompt:
        """Make a prompt of a schema that was a template.

        Parameters
        ----------
        values : mapping of str to Any
            A value for each variable.
        *more : Turn or str
            New text behind it, and messages.

        Returns
        -------
        Prompt
            The prompt that says what the template says with these values.

        Raises
        ------
        PMLError
            If the schema was no template, or a value is missing or belongs to no variable.
        """
        if self.plan is None:
            raise PMLError(
                f"schema {self.name!r} was not made of a template; make its prompts with prompt or parse_prompt"
            )
        return self.prompt(*self.plan.imports(values or {}), *more)

    def prompt(self, *parts: Import | NewText | Turn | str) -> Prompt:
        """Make a prompt of imports and new text.

        Parameters
        ----------
        *parts : Import, Turn or str
            What the prompt consists of, in order. A string is text and never markup, wherever it comes from. Messages stand last.

        Returns
        -------
        Prompt
            The prompt, checked against the schema.

        Raises
        ------
        PMLError
            If the prompt does not fit the schema.
        """
        return Prompt(self, parts)  # type: ignore[arg-type]

    def parse_prompt(self, text: str, *, source: str | None = None) -> Prompt:
        """Read a prompt from markup.

        Parameters
        ----------
        text : str
            The document: ``<prompt schema="...">``.
        source : str, optional
            What the text is called in messages.

        Returns
        -------
        Prompt
            The prompt, checked against the schema.

        Raises
        ------
        PMLError
            If the document is not well-formed, or does not fit the schema; the message says where.
        """
        nodes, root = read_prompt(text, self.name, source)
        return Prompt(self, nodes, root.place)

    def read_prompt(self, path: str | Path) -> Prompt:
        """Read a prompt from a file of markup; see `parse_prompt`."""
        path = Path(path)
        return self.parse_prompt(read_text(path), source=path.name)

    @classmethod
    def _checked(cls, tree: SchemaTree) -> Schema:
        return cls(tree.name, tree.children, tree.source)


def read_text(path: Path) -> str:
    """Return the text of a file that somebody named.

    Raises
    ------
    PMLError
        If it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PMLError(f"this is not UTF-8 (byte {error.start}); convert it", source=path.name) from None
    except OSError as error:
        raise PMLError(f"{path} cannot be read: {error.strerror}") from error
