"""The model of this process as what answers: an engine for each tenant, over one model and one store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import anyio.to_thread
from transformers import GenerationConfig

from cacheblend_rag.chat.answer import Answer, Deadline, Ending
from cacheblend_rag.chat.grammar import Guide
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, ChunkLibrary, Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_serve.backend import Asked, Backend, Wanted

__all__ = ["EngineBackend", "open_backend"]

# Most tokens of an answer where neither the request nor the model's own settings say.
_ANSWER_TOKENS = 256
_DRAWN = ("temperature", "top_p", "top_k", "min_p")
# The temperature from which the likeliest token is as good as certain, and less would make scores infinite.
_LIKELIEST = 1e-5


class EngineBackend(Backend):
    """Answers with an engine, which decodes concurrent answers together; who made the engine closes it."""

    def __init__(self, engine: BlendEngine) -> None:
        super().__init__(engine.model_name, engine)
        self._engine = engine

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's own settings say."""
        return self._engine.end_ids

    @property
    def blend(self) -> BlendConfig:
        """The engine's settings."""
        return self._engine.blend

    async def answer(self, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[str | Answer, None]:
        assert isinstance(library, Engine)
        ending = Ending(asked.stop, Deadline(asked.timeout_s), asked.thinking)
        stream = await anyio.to_thread.run_sync(_stream, library, asked, ending)
        shown = Ending((), ending.deadline) if asked.is_raw else ending
        async with aclosing(shown.apieces(stream)) as pieces:
            async for piece in pieces:
                yield piece


@contextmanager
def open_backend(wanted: Wanted) -> Iterator[EngineBackend]:
    """Load a model into this process; it is gone when the context is left."""
    if wanted.arguments:
        raise ConfigError(
            "arguments after -- are vLLM's, and the backend is 'engine'; leave them out, or use --backend vllm"
        )
    model, store, config, blend = wanted.model, wanted.store, wanted.config, wanted.blend
    with BlendEngine.from_pretrained(model, store=store, config=config, blend=blend) as engine:
        wanted.check_store(engine)
        yield EngineBackend(engine)


def _stream(engine: Engine, asked: Asked, ending: Ending) -> Any:
    """Begin an answer."""
    # A model that is not of transformers has no settings of its own.
    own = getattr(getattr(engine, "model", None), "generation_config", None) or GenerationConfig()
    most = asked.max_tokens or own.max_new_tokens or _ANSWER_TOKENS
    options: dict[str, Any] = {
        "max_new_tokens": min(most, asked.limit_tokens),
        "stopping_criteria": ending.criteria(engine.tokenizer),
        "wait_s": asked.timeout_s,
    }
    if asked.ignore_eos:
        options["eos_token_id"] = []
    processors: list[Any] = [] if asked.grammar is None else [Guide(engine, asked.grammar)]
    if asked.repetition_penalty is not None:
        options["repetition_penalty"] = asked.repetition_penalty
    drawn = {name: given for name in _DRAWN if (given := getattr(asked, name)) is not None}
    if "top_k" in drawn:
        # transformers writes 0 where OpenAI's clients may write -1: all tokens.
        drawn["top_k"] = max(drawn["top_k"], 0)
    options["do_sample"] = False
    if (own.do_sample or asked.temperature is not None) and drawn.get("temperature", 1) > _LIKELIEST:
        owns = {name: given for name in _DRAWN if (given := getattr(own, name)) is not None}
        # transformers' own default of top_k is 50, which neither the request nor the model has asked for.
        drawn = {"temperature": 1.0, "top_k": 0} | owns | drawn
        options |= drawn | {"do_sample": True} | ({} if asked.seed is None else {"seed": asked.seed})
    if processors:
        options["logits_processor"] = processors
    if asked.recompute_ratio is not None:
        options["blend"] = engine.blend.replace(recompute_ratio=asked.recompute_ratio)
    return engine.stream(asked.prompt, **options)
