from .chat import Tokens
from .layout import LaidOutPrompt, Part, SchemaLayout, Span, lay_out
from .nodes import (
    Import,
    MaxTokens,
    Module,
    Node,
    Param,
    Place,
    Role,
    Scaffold,
    Text,
    Turn,
    Union,
)
from .schema import PMLText, Prompt, Schema
from .schemas import LoadedSchema, Schemas

__all__ = [
    "Import",
    "LaidOutPrompt",
    "LoadedSchema",
    "MaxTokens",
    "Module",
    "Node",
    "PMLText",
    "Param",
    "Part",
    "Span",
    "Place",
    "Prompt",
    "Role",
    "Scaffold",
    "Schema",
    "SchemaLayout",
    "Schemas",
    "Text",
    "Tokens",
    "Turn",
    "Union",
    "lay_out",
]
