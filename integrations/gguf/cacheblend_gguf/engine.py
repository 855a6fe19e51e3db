"""The engine of a GGUF model: chunks as every engine has them, answers by llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_gguf.backend import LlamaBackend
from cacheblend_gguf.files import find_file
from cacheblend_gguf.llama import Llama, LlamaOptions
from cacheblend_rag.config import BlendConfig, EngineConfig, Tuning
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import PromptError
from cacheblend_rag.model.checkpoint import gguf_files
from cacheblend_rag.store import KVStore

__all__ = ["GGUFEngine"]


class GGUFEngine(BlendEngine):
    """An engine over a GGUF file.

    What is recomputed are the first tokens of chunks (the selector "boundary"): other selectors, attachments and all else that
    looks into a model are for models in transformers.

    Parameters
    ----------
    llama : Llama
        The model.
    **settings : Any
        Those of `BlendEngine`: `config`, `blend`, `store`, `tenant`, `tuning`.
    """

    def __init__(self, llama: Llama | LlamaBackend, **settings: Any) -> None:
        tuning = settings.get("tuning") or Tuning()
        backend = LlamaBackend(llama, tuning) if isinstance(llama, Llama) else llama
        self.llama, self._owns_llama = backend.llama, False
        super().__init__(backend, **settings)

    @classmethod
    def claims(cls, model: Any) -> bool:
        """Whether that names a GGUF file."""
        return isinstance(model, str | Path) and bool(gguf_files(model))

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

    def close(self, *, wait: bool = True) -> None:
        super().close(wait=wait)
        if self._owns_llama:
            with self.llama.scheduler:
                self.llama.close()

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: what `from_pretrained` was given, or the name of its file."""
        return model in (self.model_name, self.llama.path.name, self.llama.path.stem)

    def begin_request(self, prompt: Any, *given: Any, **options: Any) -> Request:
        request = super().begin_request(prompt, *given, **options)
        if prompt.positions is not None:
            raise PromptError("llama.cpp places tokens one after the other; leave the prompt's positions out")
        return request
