from . import errors
from .chunk import BlendPrompt, Chunk, ChunkRef, FixedText
from .config import BlendConfig, EngineConfig
from .engine import BlendEngine, BlendStream, GenerationResult
from .errors import CacheBlendError
from .report import BlendReport
from .selection import Selection, Selector, register_selector
from .store import open_remote, open_store

__all__ = [
    "BlendConfig",
    "BlendEngine",
    "BlendPrompt",
    "BlendReport",
    "BlendStream",
    "CacheBlendError",
    "Chunk",
    "ChunkRef",
    "EngineConfig",
    "FixedText",
    "GenerationResult",
    "Selection",
    "Selector",
    "errors",
    "open_remote",
    "open_store",
    "register_selector",
]

__version__: str
