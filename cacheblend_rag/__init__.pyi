from .chunk import BlendPrompt, Chunk, ChunkPart, ChunkRef, FixedText
from .config import BlendConfig, EngineConfig
from .engine import BlendEngine, BlendStream, GenerationResult, PrefillResult
from .errors import CacheBlendError
from .report import BlendReport, ChunkReport

__all__ = [
    "BlendConfig",
    "BlendEngine",
    "BlendPrompt",
    "BlendReport",
    "BlendStream",
    "CacheBlendError",
    "Chunk",
    "ChunkPart",
    "ChunkReport",
    "ChunkRef",
    "EngineConfig",
    "FixedText",
    "GenerationResult",
    "PrefillResult",
]

__version__: str
