"""The prompt markup language (Prompt Cache, section 3.2): schemas of reusable modules, and prompts that import them.

A `Schema` is read and validated without a model. `SchemaLayout` gives it the tokens of one, and `lay_out` a prompt its positions.
"""

from cacheblend_rag.pml.draw import draw_layout
from cacheblend_rag.pml.layout import Extent, Piece, SchemaLayout
from cacheblend_rag.pml.nodes import Module, Node, Param, Place, Role, Scaffold, SchemaTree, Text, Union
from cacheblend_rag.pml.parts import LaidOutPrompt, Part, PromptSegment, Slot
from cacheblend_rag.pml.place import lay_out
from cacheblend_rag.pml.prompt import Import, NewText, Prompt, Turn
from cacheblend_rag.pml.rows import LayoutRow, layout_rows, segment_rows
from cacheblend_rag.pml.schema import Schema
from cacheblend_rag.pml.template import MaxTokens
from cacheblend_rag.pml.tokens import Tokens

__all__ = [
    "Extent",
    "Import",
    "LaidOutPrompt",
    "LayoutRow",
    "MaxTokens",
    "Module",
    "NewText",
    "Node",
    "Param",
    "Part",
    "Piece",
    "Place",
    "Prompt",
    "PromptSegment",
    "Role",
    "Scaffold",
    "Schema",
    "SchemaLayout",
    "SchemaTree",
    "Slot",
    "Text",
    "Tokens",
    "Turn",
    "Union",
    "draw_layout",
    "lay_out",
    "layout_rows",
    "segment_rows",
]
