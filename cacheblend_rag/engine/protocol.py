"""Protocol of an engine: all that frameworks and servers ask of one, be it in this process (`BlendEngine`) or elsewhere.

What each method does, and raises, its docstring in `BlendEngine` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload, runtime_checkable

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine.background import AddJob
from cacheblend_rag.engine.generation import BlendStream, GenerationResult
from cacheblend_rag.errors import PromptError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.report import AddResult, WarmEstimate
from cacheblend_rag.store import NameChanges, NodeRecord

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AddOptions", "Engine", "Library"]


class AddOptions(TypedDict, total=False):
    """Options of `Library.add`."""

    progress: Callable[[int, int], None] | None
    on_refused: Callable[[Chunk, PromptError], None] | None
    whole: bool


class Library(Protocol):
    """Chunks of one model and one tenant; see `ChunkLibrary`."""

    tokenizer: Any
    config: EngineConfig
    namespace: str
    window: int | None
    is_shared: bool

    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: Literal[False] = False, **options: Unpack[AddOptions]
    ) -> AddResult: ...
    @overload
    def add(self, chunks: Iterable[Chunk], *, background: Literal[True], **options: Unpack[AddOptions]) -> AddJob: ...
    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: bool, **options: Unpack[AddOptions]
    ) -> AddResult | AddJob: ...
    def flush(self) -> None: ...
    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate: ...
    def delete(self, ids: Iterable[str]) -> int: ...
    def sync(self, present_ids: Iterable[str]) -> int: ...
    def document(self, document: str) -> list[str]: ...
    def prefetch(self, ids: Iterable[str]) -> object: ...
    def ids(self, within: str | None = None) -> list[str]: ...
    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]: ...
    def changes(self, since: int | None = None) -> NameChanges: ...
    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout: ...
    def close(self, *, wait: bool = True) -> None: ...


@runtime_checkable
class Engine(Library, Protocol):
    """A model, and the chunks that its prompts are made of; see `BlendEngine`."""

    model_name: str
    blend: BlendConfig

    @property
    def end_ids(self) -> tuple[int, ...]: ...
    def is_called(self, model: str) -> bool: ...
    def check_blend(self, blend: BlendConfig) -> BlendConfig: ...
    def generate(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> GenerationResult: ...
    def stream(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> BlendStream: ...
    def generate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]: ...
    async def agenerate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]: ...
