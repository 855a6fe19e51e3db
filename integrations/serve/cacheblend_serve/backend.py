"""Backend interface of the HTTP server: what it is asked, and what it must be able to do."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolReply, parse_calls
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import ConfigError, StoreError, StructuredOutputError
from cacheblend_rag.stops import Thinking

__all__ = ["Asked", "Backend", "Wanted", "backend_module"]


@dataclass(frozen=True)
class Wanted:
    """Settings that a backend is opened with; without a folder as `store`, KV is in RAM only."""

    model: str
    store: Path | None
    config: EngineConfig
    blend: BlendConfig
    # What vLLM is started with besides.
    arguments: tuple[str, ...] = ()

    def check_store(self, library: ChunkLibrary) -> None:
        """Raise `StoreError` if a folder is wanted, and the library has its chunks in RAM: what is stored has to last."""
        if self.store is not None and not library.store.outlives_process:
            raise StoreError(
                f"the store in {self.store} cannot be opened, and in RAM nothing that is stored would outlive this process; "
                "mend what the warning before this says, or serve without a folder"
            )


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is to be answered; None leaves it to the model, or to the engine's settings."""

    prompt: BlendPrompt
    max_tokens: int | None
    # Most tokens of any answer.
    limit_tokens: int
    stop: tuple[str, ...]
    timeout_s: float
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    # What the answer may be, in llguidance's form of Lark.
    grammar: str | None = None
    recompute_ratio: float | None = None
    # The tools that it may call, whether it has to, and whether it may call no more than one.
    tools: Sequence[dict[str, Any]] = ()
    must_call: bool = False
    one_call: bool = False
    # How thoughts are told from the answer, to which the stop strings apply; None where they are not.
    thinking: Thinking | None = None
    # Whether who asks tells them apart and cuts the answer: it is given as written, up to the token with a stop string.
    is_raw: bool = False

    def reply(self, answer: Answer) -> ToolReply | None:
        """Return what is read of an answer that may call tools; `StructuredOutputError` if it had to, and did not."""
        if not self.tools:
            return None
        is_cut = answer.finish_reason == "length"
        reply = parse_calls(answer.text, self.tools, is_cut=is_cut, must_call=self.must_call, one_call=self.one_call)
        if self.must_call and not reply.calls and not is_cut:
            raise StructuredOutputError(
                f"the answer had to be a tool call, and has ended without one: {answer.text[-80:]!r}; leave out stop strings "
                "that stand in calls",
                answer.text,
            )
        # OpenAI's form has no place for calls that cannot be read: what was written is shown.
        return reply if not reply.invalid else ToolReply(answer.text)


class Backend(Collector):
    """A model that answers, and the chunks of all its tenants, whose figures it collects; who made the `first` closes it."""

    def __init__(self, model_name: str, first: ChunkLibrary) -> None:
        self.model_name = model_name
        self._first = first
        self._libraries: dict[str | None, ChunkLibrary] = {first.config.tenant: first}
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @property
    @abstractmethod
    def blend(self) -> BlendConfig:
        """Settings of blending, unless a request says otherwise."""

    def is_ready(self) -> bool:
        """Return whether it can answer now."""
        return True

    def library(self, tenant: str | None) -> ChunkLibrary:
        """Return the chunks of a tenant, for None the first; it may take a while the first time."""
        if tenant is None:
            return self._first
        with self._lock:
            library = self._libraries.get(tenant)
            if library is None:
                library = self._libraries[tenant] = self._first.for_tenant(tenant)
            return library

    @abstractmethod
    def answer(self, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[str | Answer, None]:
        """Yield an answer piece by piece, thoughts as `Thought`, and at its end all of it; who leaves the generator ends it."""

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all tenants."""
        families: dict[str, Metric] = {}
        for tenant, library in list(self._libraries.items()):
            for family in library.metrics.registry.collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [
                    sample._replace(labels={**sample.labels, "tenant": tenant or ""}) for sample in family.samples
                ]
        yield from families.values()

    def close(self) -> None:
        """Close what was made for tenants; what waits to be encoded keeps its name, and is a miss."""
        with self._lock:
            for library in self._libraries.values():
                if library is not self._first:
                    library.close(wait=False)


def backend_module(name: str | None) -> Any:
    """Return the module of a backend, which has `open_backend`; by default vLLM's, where that is installed."""
    found = {each.name: each for each in entry_points(group="cacheblend_rag.backends")}
    if name is None:
        name = "vllm" if "vllm" in found and find_spec("vllm") is not None else "engine"
    if name not in found:
        raise ConfigError(
            f"there is no backend {name!r}; installed are {', '.join(sorted(found))}; vllm comes with vllm-cacheblend"
        )
    return found[name].load()
