"""The engine of a GGUF model: chunks as every engine has them, answers by llama.cpp."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from cacheblend_gguf.decoding import processors
from cacheblend_gguf.encoding import LlamaEncoder
from cacheblend_gguf.files import find_file
from cacheblend_gguf.llama import Llama, LlamaOptions
from cacheblend_gguf.runner import LlamaRunner
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine.answers import AnsweringLibrary
from cacheblend_rag.engine.engine import open_engine_store
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.fuse.plan import is_full
from cacheblend_rag.model import ModelCard
from cacheblend_rag.prefixes import PrefixCache
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVStore
from cacheblend_rag.tuning import Tuning

__all__ = ["GGUFEngine"]


class GGUFEngine(AnsweringLibrary):
    """An engine over a GGUF file: the methods of `Engine`, whose docstrings are in `BlendEngine`.

    What is recomputed are the first tokens of chunks (the selector "boundary"): other selectors, attachments and all else that
    looks into a model are for models in transformers.

    Parameters
    ----------
    llama : Llama
        The model.
    config, blend, store, tenant, tuning
        As for `BlendEngine`.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        config = EngineConfig.of(config)
        config = config if tenant is None else config.replace(tenant=tenant)
        self.tuning = tuning or Tuning()
        self.model_name = str(llama.path)
        self.llama = llama
        self.blend = BlendConfig()
        self.blend = self.check_blend(BlendConfig.of(blend))
        opened = open_engine_store(store, config, self.tuning, None)
        self._owns_store = opened is not store
        identity = uuid.uuid4().hex if opened.is_private else llama.digest()
        # Its sizes, in bytes, are all that is asked of a decoder elsewhere.
        shapes = tuple((1, keys.nbytes, values.nbytes) for keys, values in llama.form.layers)
        card = ModelCard(identity, llama.window, torch.uint8, shapes, (None,) * len(shapes))
        self.decoder = card  # type: ignore[assignment]
        super().__init__(
            llama.tokenizer,
            identity,
            card,
            llama.window,
            opened,
            config,
            self.tuning,
            lambda preamble: LlamaEncoder(card, preamble, self.tuning.encode_batch_tokens, llama),
            len(shapes),
            llama.scheduler,
            len(llama.tokenizer),
        )
        self._assembler.window_hint = llama.window_hint
        self._prefixes = PrefixCache(self._answering, self.namespace, config.prefix_bytes, llama.kept, llama.cut)
        self._llama_runner = LlamaRunner(llama, self._supply, self._prefixes)
        self._many = self._runner = self._llama_runner  # type: ignore[assignment]
        self._owns_llama = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
        **options: Any,
    ) -> GGUFEngine:
        """Load a GGUF file and make an engine with it.

        Parameters
        ----------
        model : str or Path
            The file, the first of several, a folder with one, or ``repo/name:file.gguf`` of the Hugging Face Hub.
        config, blend, store, tenant, tuning
            As for `BlendEngine`.
        **options : Any
            Those of `LlamaOptions`.

        Raises
        ------
        ConfigError
            If there is no such file, llama.cpp cannot load it, or an option has no meaning.
        UnsupportedModelError
            If its KV cannot be moved or taken apart, or it has no tokenizer.
        """
        opened = LlamaOptions(**options)
        llama = Llama(find_file(model).absolute(), opened)
        try:
            engine = cls(llama, config=config, blend=blend, store=store, tenant=tenant, tuning=tuning)
        except BaseException:
            llama.close()
            raise
        engine.model_name, engine._owns_llama = str(model), True
        return engine

    def another(self, **settings: Any) -> GGUFEngine:
        """Return an engine with settings of its own over this one's model; close it before this one."""
        engine = GGUFEngine(self.llama, **settings)
        engine.model_name = self.model_name
        return engine

    def for_tenant(self, tenant: str) -> GGUFEngine:
        """Return an engine of another tenant over this one's model, store and settings; close it before this one."""
        own: dict[str, Any] = {"config": self.config, "blend": self.blend, "store": self._store, "tuning": self.tuning}
        return self.another(tenant=tenant, **own)

    def close(self, *, wait: bool = True) -> None:
        super().close(wait=wait)
        if self._owns_llama:
            with self.llama.scheduler:
                self.llama.close()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the file says."""
        return self.llama.tokenizer.end_ids

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: what `from_pretrained` was given, or the name of its file."""
        return model in (self.model_name, self.llama.path.name, self.llama.path.stem)

    def attach(self, attachment: Any) -> None:
        """Refuse what looks into a model of transformers."""
        raise ConfigError(
            f"{type(attachment).__name__} needs a model in transformers, and llama.cpp answers from {self.llama.path.name}; "
            "leave it out, or load the model's folder instead"
        )

    def capability(self) -> None:
        """Return nothing: of the layers llama.cpp says nothing."""

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses; `ConfigError` if they would have single tokens recomputed."""
        blend = BlendConfig.of(blend).over(self.blend)
        selector = make_selector(blend.selector).name
        if not is_full(blend) and blend.recompute_ratio > 0 and selector not in ("none", "boundary"):
            raise ConfigError(
                f"the selector {selector} chooses single tokens to recompute, and llama.cpp computes runs of them; give "
                'selector="boundary", which takes the first tokens of each chunk, or use the model with transformers'
            )
        return blend

    def _begin(self, prompt: Any, *given: Any, **options: Any) -> Request:
        request = super()._begin(prompt, *given, **options)
        if prompt.positions is not None:
            raise PromptError("llama.cpp places tokens one after the other; leave the prompt's positions out")
        return request

    @property
    def _num_layers(self) -> int:
        return len(self.llama.form.layers)

    def _checked_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} leaves nothing to generate; give 1 or more")
        given = {name: value for name, value in options.items() if value is not None}
        processors(given)
        return given

    def _last_logits(self, request: Request, count: int) -> torch.Tensor:
        return self._llama_runner.last_logits(request, count)

    def _check_model(self) -> None:
        # A file that llama.cpp has loaded does not change.
        pass
