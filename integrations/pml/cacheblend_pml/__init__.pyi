from .chat import Tokens
from .layout import LaidOutPrompt, Part, SchemaLayout, Span, lay_out
from .nodes import Import, Module, Node, Param, Place, Role, Scaffold, Text, Turn, Union
from .schema import PMLText, Prompt, Schema
from .schemas import LoadedSchema, Schemas

__all__ = [
    "Import",
    "LaidOutPrompt",
    "LoadedSchema",
    "Module",
    "Node",
    "PMLText",
    "Param",
    "Part",
    "Place",
    "Prompt",
    "Role",
    "Scaffold",
    "Schema",
    "SchemaLayout",
    "Schemas",
    "Span",
    "Text",
    "Tokens",
    "Turn",
    "Union",
    "lay_out",
]
