"""A schema, and the prompts that are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.files import Files
from cacheblend_rag.pml.nodes import SchemaTree
from cacheblend_rag.pml.prompt import Import, NewText, Prompt, Turn
from cacheblend_rag.pml.read import SchemaReader, read_prompt
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

    Raises
    ------
    PMLError
        If it is not valid: two modules of one name, for example.
    """

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
