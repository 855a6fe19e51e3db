"""What frameworks ask of an engine: of one in this process (`BlendEngine`), or of a server's (`ServedEngine`)."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol, overload

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine.background import AddJob, AddResult, Feed
from cacheblend_rag.engine.cost import WarmEstimate
from cacheblend_rag.engine.generation import BlendStream, GenerationResult
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.keys import HEAD_PREFIX
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.store import NameChanges, NodeRecord

__all__ = ["AnyCollection", "AnyConversation", "AnyEngine", "AnyLibrary", "AnyPrefetch", "id_list"]

Present = Callable[[Sequence[str]], "Collection[str] | None"]
"""Returns those of some ids that a vector store has; None if it cannot say."""


class AnyPrefetch(Protocol):
    """Reads that `AnyLibrary.prefetch` has begun."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to read; return whether that is so."""

    def cancel(self) -> None:
        """Read no further chunk."""


class AnyConversation(Protocol):
    """Turns of one conversation, as `AnyEngine.conversation` begins them."""

    def reset(self) -> None:
        """Forget the turns so far."""


class AnyCollection(Protocol):
    """The chunks of an engine that a vector store has; `ChunkCollection` says what each method does."""

    owner: str

    def ids(self, sources: Collection[str] | None = None) -> list[str]:
        """Return the ids that were added for it."""

    def filling(self) -> AbstractContextManager[None]:
        """Say that chunks are named which the vector store will have at the end."""

    def forget(self, ids: Sequence[str], sources: Sequence[str] = ()) -> None:
        """Forget chunks, and all that was made of whole sources."""

    def notice(self, sources: Collection[str] | None = None, spared: Collection[str] = ()) -> int:
        """Forget what the vector store has no longer; return how many chunks that were."""

    def notice_at_opening(self) -> None:
        """Do what `notice` does, in the background where that takes long."""


class AnyLibrary(ABC):
    """The chunks of one model and one tenant, wherever they are kept.

    Attributes
    ----------
    tokenizer : Any
        The model's tokenizer.
    config : EngineConfig
        The settings.
    namespace : str
        Digest of the model, tokenizer, preamble and tenant: libraries with the same one share KV.
    window : int or None
        Maximum tokens that the model can read and write; None if its configuration does not say.
    """

    tokenizer: Any
    config: EngineConfig
    namespace: str
    window: int | None

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        on_refused: Callable[[Chunk, PromptError], None] | None = ...,
        background: Literal[False] = ...,
        whole: bool = ...,
    ) -> AddResult: ...

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        on_refused: Callable[[Chunk, PromptError], None] | None = ...,
        background: Literal[True],
        whole: bool = ...,
    ) -> AddJob: ...

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        on_refused: Callable[[Chunk, PromptError], None] | None = ...,
        background: bool,
        whole: bool = ...,
    ) -> AddResult | AddJob: ...

    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = None,
        ttl_s: float | None = None,
        on_refused: Callable[[Chunk, PromptError], None] | None = None,
        background: bool = False,
        whole: bool = False,
    ) -> AddResult | AddJob:
        """Encode chunks and store their KV.

        The same id with the same text does nothing; with another text it replaces the chunk. All chunks are checked
        before the first is encoded, and every stored batch is kept even if the process dies in the next one.

        In the background, the chunks are checked and named before this returns, and then encoded call by call, one
        batch whenever no prompt waits for the model. Until a chunk's turn comes it is a miss; if it is deleted or replaced
        before that, it is not encoded. With ``encode_on="second_use"`` chunks are only named.

        A chunk that is a piece of a document (`Chunk.document`) is put into it, and encoded after the chunks before it there.
        Chunks that it displaces, which now follow other text, are encoded anew in the same call. The pieces of a document may
        come in any order if their places are given, and in several calls. An id that is added again with another document or
        place is deleted there and added here.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks; if several have the same id, the last counts.
        progress : callable, optional
            Called with the numbers of finished and of all chunks after each batch; by the background thread if `background`.
        ttl_s : float, optional
            Seconds that their KV lives, instead of ``config.ttl_s``. Adding a chunk again makes it live that long from then on,
            if that is longer than it would have lived otherwise.
        on_refused : callable, optional
            Called with each chunk that cannot be served, and why, instead of the error being raised. The chunk is left out, and
            what its id stood for is deleted.
        background : bool
            Whether to return before the chunks are encoded.
        whole : bool
            Whether the chunks are all that their documents have: what else stands there is deleted in the same step in which
            they are named, so that everybody finds the document as it was or as it is now.

        Returns
        -------
        AddResult or AddJob
            What was done; in the background, a job that will say.

        Raises
        ------
        EmptyChunkError
            If a chunk's text has no tokens.
        PromptTooLongError
            If a chunk does not fit the model's window.
        ConfigError
            If `ttl_s` is not a positive number.
        StoreError
            If the KV cannot be stored; what was stored until then stays. For chunks added in the background, the job's `result`
            and `flush` raise it.
        """
        if ttl_s is not None and not (isinstance(ttl_s, int | float) and 0 < ttl_s < math.inf):
            raise ConfigError(
                f"ttl_s={ttl_s!r} must be a positive number of seconds; leave it out to keep chunks for ever"
            )
        return self._add(_chunk_list(chunks), progress, ttl_s, on_refused, background, whole)

    @abstractmethod
    def _add(
        self,
        chunks: list[Chunk],
        progress: Callable[[int, int], None] | None,
        ttl_s: float | None,
        on_refused: Callable[[Chunk, PromptError], None] | None,
        background: bool,
        whole: bool,
    ) -> AddResult | AddJob: ...

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was added in the background, and the KV of all misses so far, is stored.

        Raises
        ------
        CacheBlendError
            The first error in the background since the last flush.
        """

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Estimate what `add` would cost, by encoding a few of the new chunks, for a few seconds; nothing is stored.

        With ``encode_on="second_use"`` that is nothing. Chunks that cannot be served are left out.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks.

        Returns
        -------
        WarmEstimate
            What is not stored yet: its `chunks` and `tokens`, and what they would take, `ram_bytes`, `disk_bytes` and `seconds`.
        """
        return self._estimate(_chunk_list(chunks))

    @abstractmethod
    def _estimate(self, chunks: list[Chunk]) -> WarmEstimate: ...

    def delete(self, ids: Iterable[str], *, owner: str = "", sources: Iterable[str] = ()) -> int:
        """Forget chunks: their names at once, and their KV unless another name has the same text after the same context.

        The chunks after them in their documents know of them: their KV is dropped too, and computed again without them when
        they are needed or added.

        With the last chunk of a source that any vector store had, what prompts brought of that source is forgotten too, and what
        was added of it that no vector store has.

        Parameters
        ----------
        ids : iterable of str
            The chunks.
        owner : str
            The vector store that has them no longer; what another one has is kept.
        sources : iterable of str
            Forget all that the owner has of these (`Chunk.source`), too.

        Returns
        -------
        int
            How many of the ids were known.
        """
        return self._delete(id_list(ids), owner, id_list(sources))

    @abstractmethod
    def _delete(self, ids: list[str], owner: str, sources: list[str]) -> int: ...

    @abstractmethod
    def collection(self, name: str | None, is_known: bool, present: Present) -> AnyCollection:
        """Return what keeps these chunks in step with a vector store that has them; see `ChunkCollection`."""

    def delete_document(self, document: str) -> int:
        """Forget all chunks of a document in one step; return how many there were."""
        return self.delete(self.document(document))

    @abstractmethod
    def document(self, document: str) -> list[str]:
        """Return the ids of a document's chunks in the order in which they are read; none if it is unknown."""

    @abstractmethod
    def places(self, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each chunk is a piece of; None if the chunk is encoded alone, or unknown."""

    @abstractmethod
    def prefetch(self, ids: Iterable[str]) -> AnyPrefetch:
        """Begin to read the KV of chunks that are likely to be needed soon, and return at once.

        While a reranker works on what was retrieved, for example, their KV comes from disk and remote tiers into RAM, and onto
        the device, as far as these have room. A prompt that comes in the meantime waits for those of its chunks that are being
        read, and reads the others itself.

        Parameters
        ----------
        ids : iterable of str
            The chunks, most likely ones first; those that are not known are left out.

        Returns
        -------
        AnyPrefetch
            Can be waited for or cancelled; it need not be kept.
        """

    @abstractmethod
    def contains(self, id: str) -> bool:
        """Whether a chunk of this id is known; its KV may be evicted, and is then computed again when it is needed."""

    @abstractmethod
    def ids(self) -> list[str]:
        """Return the ids of all known chunks of this model, without heads of prompts."""

    @abstractmethod
    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return what is known of each id: its tokens and the digest of its text; None where the id is unknown."""

    @property
    @abstractmethod
    def revision(self) -> int:
        """A number that every added, replaced or deleted chunk raises, in any process; equal numbers mean no change."""

    @abstractmethod
    def changes(self, since: int | None = None) -> NameChanges:
        """Return which chunks are known, or which of them were added, replaced or deleted since an earlier call.

        Parameters
        ----------
        since : int, optional
            The `mark` of the earlier call; by default, and if that was ten thousand changes ago, all chunks are returned.

        Returns
        -------
        NameChanges
            The names, without those that `ids` leaves out.
        """

    def prompt_ids(self, prompt: BlendPrompt) -> tuple[int, ...]:
        """Return the token ids that the model is given for `prompt`."""
        return self.prompt_layout(prompt).token_ids

    @abstractmethod
    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout:
        """Return where the chunks of `prompt` are among its tokens."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """Let go of everything, once what was added in the background is stored, if `wait`."""

    @abstractmethod
    def note_unfound(self) -> None:
        """Count a prompt in which no stored chunk was found though one is in it in another form."""


class AnyEngine(AnyLibrary):
    """A model, and the chunks that its prompts are made of, wherever both are.

    Attributes
    ----------
    model_name : str
        What the model is called.
    blend : BlendConfig
        How prompts are blended, unless a call says otherwise.
    end_ids : tuple of int
        The tokens that end an answer.
    """

    model_name: str
    blend: BlendConfig
    end_ids: tuple[int, ...]

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model."""
        return model == self.model_name

    @abstractmethod
    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return settings with what they leave open filled in; `ConfigError` if they do not fit the model."""

    @abstractmethod
    def conversation(self, max_bytes: int | None = None) -> AnyConversation:
        """Begin a conversation, whose turns reuse what earlier turns have computed, where that is kept."""

    @abstractmethod
    def generate(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        conversation: Any = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt."""

    @abstractmethod
    def stream(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        conversation: Any = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> BlendStream:
        """Answer a prompt piece by piece; what is wrong with the prompt is raised at once."""

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts, which is faster than one after the other.

        Chunks without stored KV are encoded in one go, each once whichever prompts have it; the prompts are prefilled one after
        the other, and their answers are decoded together in a padded batch. Greedy answers are those of `generate`, except for
        rounding: if two tokens are equally likely to the last digits, either may be chosen. Sampled answers are different
        draws. Where settings or options do not allow a batch (repair, `kv_capacity`, options that read a prompt's ids),
        answers are decoded one by one, and each report's `alone_reason` says why.

        Stopping criteria and logits processors see each prompt as a batch of one without padding. Every prompt gets shallow
        copies of those given, unless ``stopping_criteria`` and ``logits_processor`` hold a list for each prompt.

        Parameters
        ----------
        prompts : sequence of BlendPrompt
            The prompts. All of them are checked before the first is computed.
        max_new_tokens : int, optional
            Maximum tokens of each answer, as in `generate`.
        batch_size : int, optional
            Maximum prompts that are decoded together; by default as many as memory is meant to allow.
        blend : BlendConfig, optional
            Blending settings for this call; those it does not set are the engine's.
        wait_s : float, optional
            Maximum seconds to wait for the model while other calls have it; by default as long as it takes.
        **generation_kwargs : Any
            Options of transformers' ``generate``.

        Returns
        -------
        list of GenerationResult
            The answers, in the order of the prompts. The times in their reports count from this call on.

        Raises
        ------
        PromptError
            If a prompt cannot be served.
        AnswerTimeoutError
            If the model was not free within `wait_s`.
        ConfigError
            If an option cannot be combined with blending, or `batch_size` is below 1.
        """
        return self._generate_many(
            prompts, max_new_tokens, batch_size, blend, wait_s, generation_kwargs, threading.Event()
        )

    async def agenerate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts as `generate_many` does, in a separate thread; if cancelled, that ends at the next token."""
        stop = threading.Event()
        answers: Feed[None, list[GenerationResult]] = Feed()
        answers.start(
            partial(self._generate_many, prompts, max_new_tokens, batch_size, blend, wait_s, generation_kwargs, stop),
            "cacheblend-many",
        )
        try:
            return await answers.aoutcome()
        finally:
            stop.set()

    @abstractmethod
    def _generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None,
        batch_size: int | None,
        blend: BlendConfig | None,
        wait_s: float | None,
        options: dict[str, Any],
        stop: threading.Event,
    ) -> list[GenerationResult]: ...


def id_list(ids: Iterable[str]) -> list[str]:
    """Return ids as a list; `ConfigError` for a single string."""
    if isinstance(ids, str):
        raise ConfigError(f"ids is the string {ids[:40]!r}; give a list of ids")
    return list(ids)


def _chunk_list(chunks: Iterable[Chunk]) -> list[Chunk]:
    if isinstance(chunks, Chunk):
        raise ConfigError("chunks is a single Chunk; give a list of them, as in [Chunk(text, id)]")
    chunks = list(chunks)
    for chunk in chunks:
        if not isinstance(chunk, Chunk):
            raise ConfigError(f"{chunk!r} is a {type(chunk).__name__}; give Chunk objects, as in Chunk(text, id)")
        if chunk.id is not None and chunk.id.startswith(HEAD_PREFIX):
            raise ConfigError(
                f"the id {chunk.id!r} begins with {HEAD_PREFIX!r}, as the names of prompts' heads do; give the chunk another id"
            )
    return chunks
