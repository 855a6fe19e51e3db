"""Which settings a call may bring to an engine that was made with settings of its own."""

from __future__ import annotations

from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import check_attention, check_selector
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import Decoder, num_decoder_layers

__all__ = ["CallSettings"]

# Settings that a single call cannot change.
_ENGINE_SETTINGS = frozenset(
    {
        "encoding_prefix",
        "dtype",
        "device",
        "device_bytes",
        "ram_bytes",
        "disk_bytes",
        "ram_codec",
        "page_locked",
        "disk_codec",
        "remote",
        "write_back_bytes",
        "namespace",
        "ttl_s",
        "conversation_bytes",
        "encode_batch_tokens",
        "encode_on",
        "context",
        "context_tokens",
        "separator",
        "profile_path",
        "profile_budget_s",
        "guard_rate",
        "guard_limit",
        "guard_window",
        "guard_action",
        "self_check",
        "strict",
    }
)


class CallSettings:
    """Checks the settings of calls against a model and what was settled when its engine was made.

    Parameters
    ----------
    config : BlendConfig
        The engine's settings.
    model : PreTrainedModel
        The model.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.

    Raises
    ------
    ConfigError
        If the engine's own settings name a selector or a layer that does not exist, or ask of the model what it does not have.
    """

    def __init__(self, config: BlendConfig, model: PreTrainedModel, decoder: Decoder | None) -> None:
        self._config = config
        self._model = model
        self._decoder = decoder
        self._check_model(config)

    def for_call(self, config: BlendConfig) -> BlendConfig:
        """Return settings as a call that is given them uses them; see `BlendEngine.check_config`."""
        config = BlendConfig.of(config)
        self._check_settled(config)
        self._check_model(config)
        return config

    @staticmethod
    def is_settled(name: str) -> bool:
        """Return whether the setting of this name is settled when an engine is made, so that no single call can change it."""
        return name in _ENGINE_SETTINGS

    def _check_model(self, config: BlendConfig) -> None:
        # A model whose configuration names no layers is never blended.
        if self._decoder is not None or num_decoder_layers(self._model):
            check_selector(config, num_decoder_layers(self._model))
        if self._decoder is not None:
            check_attention(config, self._decoder)

    def _check_settled(self, config: BlendConfig) -> None:
        for name in sorted(_ENGINE_SETTINGS & config.model_fields_set):
            if getattr(config, name) != getattr(self._config, name):
                # The address of a remote tier may hold a password.
                shown = name != "remote"
                asked = f"={getattr(config, name)!r}" if shown else ""
                settled = f" as {getattr(self._config, name)!r}" if shown else ""
                raise ConfigError(
                    f"{name}{asked} cannot be set for one call: it was settled{settled} when the engine was made; make another "
                    "engine for it"
                )
