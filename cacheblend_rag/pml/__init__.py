"""The prompt markup language (Prompt Cache, section 3.2): schemas of reusable modules, and prompts that import them.

A `Schema` is read and validated without a model. `SchemaLayout` gives it the tokens of one, and `lay_out` a prompt its positions.
`Schemas` has an engine serve it.
"""

from cacheblend_rag.pml.chat import Tokens
from cacheblend_rag.pml.layout import LaidOutPrompt, Part, SchemaLayout, Span, lay_out
from cacheblend_rag.pml.nodes import (
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
from cacheblend_rag.pml.schema import PROMPT_KEY, PMLText, Prompt, Schema, prompt_in
from cacheblend_rag.pml.schemas import LoadedSchema, Schemas, is_part

__all__ = [
    "PROMPT_KEY",
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
    "is_part",
    "lay_out",
    "prompt_in",
]
