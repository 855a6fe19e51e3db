from .chunk import BlendPrompt, Chunk, ChunkRef, FixedText
from .config import BlendConfig, EngineConfig
from .engine import BlendEngine, BlendStream, GenerationResult
from .errors import (
    AnswerTimeoutError,
    BackendError,
    CacheBlendError,
    ChunkReadError,
    ConfigError,
    EmptyChunkError,
    PMLError,
    PromptError,
    PromptTooLongError,
    RemoteUnavailableError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreReadOnlyError,
    StructuredOutputError,
    UnknownChunkError,
    UnsupportedModelError,
)
from .report import BlendReport
from .selection import Selection, Selector, register_selector
from .store import open_remote, open_store

__all__ = [
    "AnswerTimeoutError",
    "BackendError",
    "BlendConfig",
    "BlendEngine",
    "BlendPrompt",
    "BlendReport",
    "BlendStream",
    "CacheBlendError",
    "Chunk",
    "ChunkReadError",
    "ChunkRef",
    "ConfigError",
    "EmptyChunkError",
    "EngineConfig",
    "FixedText",
    "GenerationResult",
    "PMLError",
    "PromptError",
    "PromptTooLongError",
    "RemoteUnavailableError",
    "Selection",
    "Selector",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StructuredOutputError",
    "UnknownChunkError",
    "UnsupportedModelError",
    "open_remote",
    "open_store",
    "register_selector",
]

__version__: str
