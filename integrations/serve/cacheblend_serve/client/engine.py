"""A server's engine: what is asked of it goes over HTTP, but for what the tokenizer alone can tell."""

from __future__ import annotations

import io
import logging
import math
import os
import tempfile
import threading
import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import quote

from pydantic import TypeAdapter
from transformers import AutoTokenizer

from cacheblend_rag.chunk import BlendPrompt, Chunk, check_text, chunk_list, id_list, out_of_date
from cacheblend_rag.config import SERVER_KEY_VARIABLE, BlendConfig, EngineConfig
from cacheblend_rag.engine.batch import options_of_each
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.ingest import AddJob, Jobs
from cacheblend_rag.engine.protocol import AddOptions, BlendStream, GenerationResult, in_thread
from cacheblend_rag.errors import BackendError, CacheBlendError, ConfigError, PromptError, UnknownChunkError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.report import AddResult, WarmEstimate
from cacheblend_rag.store import NameChanges, NodeRecord
from cacheblend_serve.client.connection import Connection
from cacheblend_serve.client.wire import asked_options, chunk_item, parts_of, read_report

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ServedEngine", "served_engine"]

logger = logging.getLogger(__name__)

# Ids, and chunks, of one request.
_BATCH, _CHUNKS = 2_000, 200
_COUNTS = [field.name for field in fields(AddResult)]
# Answers that are waited for at once; the server answers them together.
_AT_ONCE = 16
# Seconds that are left of a time limit at least: the server says that it has passed.
_LEAST_S = 0.001

_records: TypeAdapter[list[NodeRecord | None]] = TypeAdapter(list[NodeRecord | None])
_changes: TypeAdapter[NameChanges] = TypeAdapter(NameChanges)
_layout: TypeAdapter[PromptLayout] = TypeAdapter(PromptLayout)


class ServedEngine:
    """The engine behind ``cacheblend-rag serve``: model and KV are there, and this process needs neither.

    It has the methods of `Engine`; `BlendEngine` says what they do.

    Give it as ``engine=`` wherever the frameworks' objects take a `BlendEngine`, or give these ``server=url``. It has the chunks
    of the tenant whose key it is given.

    Some of what an engine of this process does stays there, and is a `ConfigError` here: schemas (PML), estimates, settings of
    blending beyond the ratio, and transformers' own options of decoding beyond temperature, `top_p`, `top_k`, `seed` and stop
    strings.

    Parameters
    ----------
    url : str
        The server's address, as ``http://127.0.0.1:8000``.
    key : str, optional
        The API key; by default ``CACHEBLEND_SERVER_KEY`` of the environment.

    Raises
    ------
    BackendError
        If the server cannot be asked.
    ConfigError
        If it refuses the key.
    """

    is_shared = True

    def __init__(self, url: str, key: str | None = None) -> None:
        self._server = Connection(url, os.environ.get(SERVER_KEY_VARIABLE) if key is None else key)
        try:
            facts = self._server.read("/v1/models")["data"][0]
            self.tokenizer = self._load_tokenizer()
            self.model_name = str(facts["id"])
            self.namespace = str(facts["namespace"])
            self.window = facts["max_model_len"]
            self.end_ids = tuple(facts["end_ids"])
            self.config = EngineConfig(**facts["config"])
            self.blend = BlendConfig(**facts["blend"])
        except (KeyError, IndexError, TypeError) as error:
            self._server.close()
            raise BackendError(f"{self._server.url} is not a cacheblend-rag server; check the address") from error
        except BaseException:
            self._server.close()
            raise
        self._jobs = Jobs()

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, wait: bool = True) -> None:
        """Let go of the server, once it has stored what was added in the background, if `wait`."""
        self._jobs.close(wait)
        self._server.close()

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is not here.
        what = "needs an engine in this process" if hasattr(BlendEngine, name) else "is nothing that an engine has"
        raise AttributeError(f"a ServedEngine has no {name}: that {what}", name=name, obj=self)

    # Chunks

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

    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = None,
        on_refused: Callable[[Chunk, PromptError], None] | None = None,
        background: bool = False,
        whole: bool = False,
        gone: Sequence[str] = (),
    ) -> AddResult | AddJob:
        if whole:
            raise ConfigError(
                "whole needs an engine in this process; a server replaces a document by PUT /v1/documents/NAME"
            )
        if gone:
            self.delete(gone)
        body = {"leave_out": on_refused is not None, "background": background, "stream": True}
        chunks = chunk_list(chunks)
        result = self._send(chunks, body, progress, on_refused)
        if not background:
            return result
        # Checked and named by now, as by an engine of this process.
        job = AddJob(0, len(chunks), progress)

        def wait(is_given_up: Callable[[], bool]) -> AddResult:
            self._wait_for_server(is_given_up)
            if not is_given_up():
                job.advance(len(chunks))
            return result

        return self._jobs.submit(job, wait)

    def _send(
        self,
        chunks: list[Chunk],
        body: dict[str, Any],
        progress: Callable[[int, int], None] | None,
        on_refused: Callable[[Chunk, PromptError], None] | None,
    ) -> AddResult:
        counts, begun = Counter[str](), 0
        for part in _parts(_sendable(chunks, on_refused), _CHUNKS):
            sent = body | {"chunks": [chunk_item(each) for each in part]}
            for event in self._server.events("/v1/chunks", partial(dict, sent)):
                if "status" not in event:
                    if progress is not None:
                        progress(begun + event["done"], len(chunks))
                    continue
                for each in event.get("refused", ()):
                    if on_refused is not None:
                        on_refused(part[each["index"]], PromptError(each["message"]))
                counts.update({name: event[name] for name in _COUNTS})
                begun += len(part)
        return AddResult(*(counts[name] for name in _COUNTS))

    def flush(self) -> None:
        self._jobs.flush()
        self._wait_for_server(lambda: False)

    def _wait_for_server(self, is_over: Callable[[], bool]) -> None:
        """Wait until what is added in the background is stored."""
        for _ in self._server.events("/v1/chunks/flush", dict, is_over):
            pass

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        raise ConfigError("an estimate needs an engine in this process; make a BlendEngine of the model")

    def delete(self, ids: Iterable[str]) -> int:
        parts = _parts(id_list(ids), _BATCH)
        return sum(self._server.read("/v1/chunks/delete", {"ids": part})["deleted"] for part in parts)

    def sync(self, present_ids: Iterable[str]) -> int:
        return self.delete(out_of_date(self.ids(), present_ids))

    def document(self, document: str) -> list[str]:
        try:
            # "." and ".." mean other addresses, unless they are escaped.
            name = quote(document, safe="").replace(".", "%2E")
            return list(self._server.read(f"/v1/documents/{name}")["chunks"])
        except UnknownChunkError:
            return []

    def ids(self, within: str | None = None) -> list[str]:
        if within is None:
            return list(self._listed("/v1/chunks"))
        begun = takewhile(lambda name: name.startswith(within), self._listed("/v1/documents", within))
        return [id for name in begun for id in self.document(name)]

    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        parts = _parts(id_list(ids), _BATCH)
        found = [each for part in parts for each in self._server.read("/v1/chunks/records", {"ids": part})["data"]]
        return _records.validate_python(found)

    def changes(self, since: int | None = None) -> NameChanges:
        given = {} if since is None else {"since": since}
        return _changes.validate_python(self._server.read("/v1/chunks/changes", **given))

    def prefetch(self, ids: Iterable[str]) -> None:
        wanted = id_list(ids)
        try:
            if wanted:
                self._server.read("/v1/prefetch", {"ids": wanted[:_BATCH]})
        except CacheBlendError as error:
            logger.debug("chunks are not read ahead: %s", error)

    def _listed(self, path: str, after: str = "") -> Iterator[str]:
        has_more = True
        while has_more:
            page = self._server.read(path, after=after)
            ids = [each["id"] for each in page["data"]]
            yield from ids
            has_more, after = page["has_more"], ids[-1] if ids else after

    # Prompts

    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout:
        return _layout.validate_python(self._server.read("/v1/completions/layout", {"prompt": parts_of(prompt)}))

    # Answers

    def is_called(self, model: str) -> bool:
        return model == self.model_name

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        return BlendConfig.of(blend).over(self.blend)

    def generate(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> GenerationResult:
        return self._call(prompt, max_new_tokens, **options)(None, threading.Event())

    def stream(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> BlendStream:
        """Answer a prompt piece by piece; what the server refuses is raised by the first piece."""
        return BlendStream(self._call(prompt, max_new_tokens, **options))

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        stop: threading.Event | None = None,
        on_failed: Callable[[int, Exception], None] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        end = stop or threading.Event()

        def ask(number: int, own: dict[str, Any]) -> GenerationResult | None:
            try:
                return self._call(prompts[number], max_new_tokens, **own)(None, end)
            except Exception as error:
                if on_failed is None:
                    raise
                on_failed(number, error)
                return None

        each = options_of_each(options, len(prompts))
        with ThreadPoolExecutor(min(len(prompts) or 1, batch_size or _AT_ONCE)) as pool:
            try:
                return [result for result in pool.map(ask, range(len(prompts)), each) if result is not None]
            except BaseException:
                # The others are not waited for.
                end.set()
                raise

    async def agenerate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]:
        return await in_thread(partial(self.generate_many, prompts, max_new_tokens, **options))

    def _call(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        **options: Any,
    ) -> Callable[[Callable[[str], None] | None, threading.Event], GenerationResult]:
        """Return what asks for an answer, shows its pieces, and ends it when an event is set."""
        asked, deadline = asked_options(options)
        if wait_s is not None and deadline is None:
            raise ConfigError("wait_s is the server's own; give a time limit for the whole answer instead, timeout")
        body = {"prompt": parts_of(prompt), "max_tokens": max_new_tokens, "stream": True, "report": True} | asked
        body |= {} if blend is None else self._ratio(blend)

        def ask(show: Callable[[str], None] | None, stop: threading.Event) -> GenerationResult:
            def is_over() -> bool:
                # The interpreter waits for a stream's thread when it ends, and its answer is of no use then.
                return stop.is_set() or not threading.main_thread().is_alive()

            def asked_now() -> dict[str, Any]:
                return body if deadline is None else body | {"timeout_s": max(deadline.left_s, _LEAST_S)}

            text, reason = "", ""
            patience_s = math.inf if deadline is None else deadline.left_s
            with closing(self._server.events("/v1/completions", asked_now, is_over, patience_s)) as events:
                for event in events:
                    for choice in event["choices"]:
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
                        if show is not None and choice["text"]:
                            show(choice["text"])
                    if "blend" in event:
                        # Which tokens it was made of, the server does not say: that of vLLM does not know.
                        return GenerationResult(text, (), (), read_report(event["blend"][0]), reason)
            raise CacheBlendError("the answer was cut off; try again")

        return ask

    def _ratio(self, blend: BlendConfig) -> dict[str, Any]:
        """Return how a call's settings are said; `ConfigError` if they differ from the server's in more than the ratio."""
        asked, own = self.check_blend(blend).model_dump(), self.blend.model_dump()
        changed = [name for name, value in asked.items() if value != own[name]]
        if others := [name for name in changed if name != "recompute_ratio"]:
            raise ConfigError(
                f"{', '.join(others)} of a call cannot be sent to a server, which takes recompute_ratio; leave it out, or set it "
                "where the server is started"
            )
        return {name: asked[name] for name in changed}

    def _load_tokenizer(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(io.BytesIO(self._server.reply("/v1/tokenizer").content)) as files:
                files.extractall(folder)
            return AutoTokenizer.from_pretrained(folder)


def served_engine(url: str) -> ServedEngine:
    """Return the one engine of a server in this process, which all that name its address share, with the environment's key."""
    with _engines_lock:
        key = url, os.environ.get(SERVER_KEY_VARIABLE)
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = ServedEngine(url)
        return engine


_engines: weakref.WeakValueDictionary[tuple[str, str | None], ServedEngine] = weakref.WeakValueDictionary()
_engines_lock = threading.Lock()


def _sendable(chunks: list[Chunk], on_refused: Callable[[Chunk, PromptError], None] | None) -> list[Chunk]:
    """Return the chunks whose text can be written down; the others are refused."""
    sendable = []
    for chunk in chunks:
        try:
            check_text(chunk.text)
            sendable.append(chunk)
        except PromptError as error:
            if on_refused is None:
                raise
            on_refused(chunk, error)
    return sendable


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield chunks or ids in requests that are not too large for a server."""
    for start in range(0, len(items), most):
        yield items[start : start + most]
