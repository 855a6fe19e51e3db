"""The engine: a model is inspected, its KV gets an identity, a store is opened, and all of it is put together."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from contextlib import ExitStack
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.encode import Encoder
from cacheblend_rag.engine.answers import AnsweringLibrary
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.decode import end_ids
from cacheblend_rag.engine.many import Many
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreReadOnlyError, UnsupportedModelError
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.fuse.selfcheck import check_blending
from cacheblend_rag.model import (
    Capability,
    Decoder,
    ModelCard,
    WeightsWatch,
    capability,
    inspect_model,
    model_fingerprint,
    model_window,
    num_decoder_layers,
    state_layers,
    unwrapped,
)
from cacheblend_rag.model.checkpoint import gguf_files, load_pretrained
from cacheblend_rag.prefixes import PrefixCache, cut_layers
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.tuning import Tuning

__all__ = ["BlendEngine", "engine_identity", "look_at_model", "open_engine_store"]

logger = logging.getLogger(__name__)
# Of each model, what all engines over it keep of earlier prompts.
_shelves: WeakKeyDictionary[PreTrainedModel, WeakSet[PrefixCache]] = WeakKeyDictionary()
_Attached = TypeVar("_Attached", bound=Attachment)


class BlendEngine(AnsweringLibrary):
    """Answers prompts made of stored chunks with an open-weight model in this process.

    Any number of threads may call it, and any number of engines may share a model, which one computation at a time has.
    Calls of `generate` and `stream` that find it busy are decoded together, as `generate_many` does, if settings and
    options allow it.

    Parameters
    ----------
    model : PreTrainedModel
        A Hugging Face causal language model. With the extra `hybrid`, one with recurrent layers makes it a `HybridEngine`.
    tokenizer : Any
        Its tokenizer.
    config : EngineConfig, optional
        The engine's settings; by default those of the environment.
    blend : BlendConfig, optional
        How prompts are blended unless a call says otherwise; by default the environment's settings.
    store : KVStore, str, Path or None
        Where KV is kept: a folder, a store that you opened (`open_store`), or None for this process's RAM.
    tenant : str, optional
        Who owns the KV; a shorthand for the setting of that name, over which it takes precedence.
    tuning : optional
        Constants that tests and benchmarks change; not for other use.

    Attributes
    ----------
    model_name : str
        What `from_pretrained` was given, or else the model's own name.
    window : int or None
        Maximum tokens that the model can read and write; None if its configuration does not say.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended, as `unsupported_reason` says.

    Raises
    ------
    ConfigError
        If the settings name a selector or a check layer that does not exist.
    UnsupportedModelError
        If the model cannot be blended and ``config.strict`` is set.
    StoreFormatError, StoreReadOnlyError
        If the folder is no store, is one of another version, or none can be made there. A store that cannot be opened for another
        reason (damage, a full disk, a lock) is replaced by this process's RAM, which a warning says.
    """

    def __new__(cls, model: PreTrainedModel, *given: Any, **options: Any) -> BlendEngine:
        # Where layers keep a state, another distribution's engine can do more than refuse.
        if cls is BlendEngine and state_layers(model):
            for hybrid in entry_points(group="cacheblend_rag.engines", name="hybrid"):
                cls = hybrid.load()
        return super().__new__(cls)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        config = EngineConfig.of(config)
        config = self.config = config if tenant is None else config.replace(tenant=tenant)
        self.blend = BlendConfig.of(blend)
        self.tuning = tuning or Tuning()
        self.model = model.eval()
        self.model_name: str = getattr(model, "name_or_path", "") or type(model).__name__
        self.window = model_window(model)
        self.decoder, self.unsupported_reason = self._look_at_model()
        self.check_blend(self.blend)
        self._store = open_engine_store(store, self.config, self.tuning, self.decoder)
        self._owns_store = self._store is not store
        with ExitStack() as undo:
            if self._owns_store:
                # It could not be closed any more if the rest fails.
                undo.callback(self._store.close)
            self._weights = WeightsWatch(self.model)
            embedding: Any = unwrapped(model).get_input_embeddings()
            self._identity = engine_identity(model, tokenizer, private=self._store.is_private)
            super().__init__(
                tokenizer,
                self._identity,
                self.decoder,
                self.window,
                self._store,
                config,
                self.tuning,
                self._encoder,
                num_decoder_layers(model) if self.decoder is None else self.decoder.num_kv_layers,
                scheduler_of(model),
                embedding.weight.shape[0],
            )
            shelf = _shelves.setdefault(unwrapped(model), WeakSet())
            self._prefixes = PrefixCache(self._answering, self.namespace, config.prefix_bytes, shelf, cut_layers)
            self._runner = self._make_runner()
            self._many = Many(model, tokenizer, self.decoder, self._runner, self.tuning)
            undo.pop_all()

    def _make_runner(self) -> Runner:
        """Return what prefills prompts."""
        return Runner(self.model, self.decoder, self.unsupported_reason, self._supply, self.tuning, self._prefixes)

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
        **model_kwargs: Any,
    ) -> BlendEngine:
        """Load a model and its tokenizer and make an engine with them.

        Parameters
        ----------
        model : str or Path
            A Hugging Face id, a folder, or a GGUF file.
            With the extra `gguf`, llama.cpp answers from a GGUF file (``repo/name:file.gguf`` is one of the Hub), and what this
            returns is a `GGUFEngine`, which takes options of llama.cpp.
        config : EngineConfig, optional
            The settings; `dtype` and `device` say how the model is loaded.
        blend, store, tenant, tuning
            As for an engine.
        **model_kwargs : Any
            Passed to ``AutoModelForCausalLM.from_pretrained``; what locates the model (`revision`, `token` and so on) also to the
            tokenizer's.

        Raises
        ------
        ConfigError
            If there is no such model, it cannot be reached, its device does not exist, or the settings are invalid.
        """
        config, blend = EngineConfig.of(config), BlendConfig.of(blend)
        # Known before a large model is loaded for nothing.
        make_selector(blend.selector)
        given: dict[str, Any] = {"config": config, "blend": blend, "store": store, "tenant": tenant, "tuning": tuning}
        for engine_of_files in entry_points(group="cacheblend_rag.engines", name="gguf") if gguf_files(model) else ():
            with needs_extra("gguf", "a model in a GGUF file"):
                opened = engine_of_files.load()
            return cast(BlendEngine, opened.from_pretrained(model, **given, **model_kwargs))
        engine = cls(*load_pretrained(model, config, model_kwargs), **given)
        engine.model_name = str(model)
        return engine

    def for_tenant(self, tenant: str) -> BlendEngine:
        """Return an engine of another tenant over this one's model, store and settings; close it before this one.

        What is attached to this one is attached to it too, as far as attachments say what that is.
        """
        engine = type(self)(
            self.model,
            self.tokenizer,
            config=self.config,
            blend=self.blend,
            store=self._store,
            tenant=tenant,
            tuning=self.tuning,
        )
        engine.model_name = self.model_name
        for each in self.attachments:
            if (other := each.for_tenant()) is not None:
                engine.attach(other)
        return engine

    def attach(self, attachment: _Attached) -> _Attached:
        """Attach something optional, of `cacheblend_attachments` or of yours, to all requests that come from then on; return it.

        Its ``close``, or the engine's, detaches it.

        Raises
        ------
        ConfigError
            If it is none, was attached before, does not go with the model or what is attached, or the engine is closed.
        """
        self._check_open()
        if not isinstance(attachment, Attachment):
            raise ConfigError(f"{attachment!r:.40} is not an Attachment; give one, for example SnapKV(0.25)")
        if attachment.leave is not None:
            raise ConfigError(f"this {type(attachment).__name__} was attached before; make another one")
        attachment.attached(self)
        attachment.leave = partial(self._runner.attachments.remove, attachment)
        self._runner.attachments.append(attachment)
        return attachment

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: the one it is known by here, or that of its configuration."""
        return model in (self.model_name, getattr(self.model, "name_or_path", ""))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's own settings say."""
        return end_ids(self.model)

    def capability(self) -> Capability:
        """Return what each layer of the model is like, and what blending does there, or why it does nothing."""
        return capability(self.model, self.decoder, self.unsupported_reason)

    def card(self) -> ModelCard:
        """Return what a server of the same weights must know to take KV from this engine's store.

        `UnsupportedModelError` if the model's KV cannot be moved.
        """
        if self.decoder is None or not self.decoder.is_movable:
            raise UnsupportedModelError(
                self.unsupported_reason or f"KV of {type(self.model).__name__} cannot be moved to another position"
            )
        with self._runner.scheduler:
            return ModelCard.of(self.decoder, self._identity, self.window)

    def _look_at_model(self) -> tuple[Decoder | None, str | None]:
        return look_at_model(self.model, strict=self.config.strict, self_check=self.tuning.self_check)

    def _encoder(self, preamble: tuple[int, ...]) -> Encoder | None:
        return None if self.decoder is None else Encoder(self.decoder, preamble, self.tuning.encode_batch_tokens)

    def _check_model(self) -> None:
        self._weights.check()


def look_at_model(model: PreTrainedModel, *, strict: bool, self_check: bool) -> tuple[Decoder | None, str | None]:
    """Return the model as blending sees it, or None and why it cannot be blended; `strict` raises that."""
    try:
        # Another engine may be at work on it.
        with scheduler_of(model):
            decoder = inspect_model(model)
            if self_check:
                check_blending(decoder)
    except UnsupportedModelError as error:
        if strict:
            raise
        logger.warning("%s; its prompts are prefilled in full", error)
        return None, str(error)
    return decoder, None


def engine_identity(model: PreTrainedModel, tokenizer: Any, *, private: bool) -> str:
    """Return a digest of a model's weights and a tokenizer's vocabulary and rules: 32 hexadecimal digits."""
    if private:
        # In a store that this engine alone sees, a random one does as well, and no weights need be read.
        return uuid.uuid4().hex
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{model_fingerprint(model)}|{rules}".encode(), digest_size=16).hexdigest()


def open_engine_store(
    store: KVStore | str | Path | None, config: EngineConfig, tuning: Tuning, decoder: Decoder | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name; one that is open already is returned."""
    if isinstance(store, KVStore):
        return store
    if not isinstance(store, str | Path | None):
        raise ConfigError(
            f"store is a {type(store).__name__}; give a folder, or what open_store returned, which several engines may share"
        )
    devices = [torch.device("cpu")] if decoder is None else decoder.devices
    by_default = any(device.type == "cuda" for device in devices)
    settings: dict[str, Any] = {
        "page_locked": by_default if tuning.page_locked is None else tuning.page_locked,
        "ram_bytes": config.ram_bytes,
        "disk_bytes": config.disk_bytes,
        "ram_codec": config.ram_codec,
        "disk_codec": config.disk_codec,
        "remote": None if config.remote is None else config.remote.get_secret_value(),
        "names": config.names_url,
    }
    try:
        return open_store(store, **settings)
    except StoreError as error:
        # Another folder was meant; or it is RAM that fails.
        if store is None or isinstance(error, StoreFormatError | StoreReadOnlyError):
            raise
        logger.warning(
            "the store cannot be opened, so KV is kept in the memory of this process and is lost with it: %s", error
        )
        return open_store(None, **settings)
