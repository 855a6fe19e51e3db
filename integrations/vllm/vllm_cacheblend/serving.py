"""``cacheblend-rag serve --backend vllm``: what it takes to answer with vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine.engine import open_engine_store
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import ModelCard
from cacheblend_rag.model.checkpoint import model_folder
from cacheblend_rag.store import open_store
from cacheblend_rag.tuning import Tuning
from cacheblend_serve.backend import Wanted
from vllm_cacheblend.asking import FULL, NAMES_VARIABLE, REMOTE_VARIABLE, Precision, kv_transfer_config
from vllm_cacheblend.backend import VLLMBackend
from vllm_cacheblend.cards import card_of, precision_of
from vllm_cacheblend.client import VLLMClient
from vllm_cacheblend.library import VLLMLibrary
from vllm_cacheblend.process import VLLMProcess
from vllm_cacheblend.proving import prove_by
from vllm_cacheblend.spooling import own_folder

__all__ = ["command", "open_backend"]

_NO_FOLDER = "vLLM takes KV from a folder that it shares with the server; give one by --store, or use --backend engine"
_RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def open_backend(wanted: Wanted) -> Iterator[VLLMBackend]:
    """Start vLLM, or find the one that runs already, over the store; it ends when the context is left.

    Raises
    ------
    ConfigError
        If the settings are none that vLLM can follow, or what it writes could be read by others.
    BackendError
        If vLLM does not start, or is not there.
    """
    if wanted.blend.recompute_ratio != 0:
        raise ConfigError(
            f"recompute_ratio={wanted.blend.recompute_ratio} is not possible with vLLM, which goes on after stored KV and "
            "recomputes nothing in it; leave it at 0, or use --backend engine"
        )
    if wanted.store is None:
        raise ConfigError(_NO_FOLDER)
    folder, config = model_folder(wanted.model), _config(wanted.config)
    # Opened first, so that the folder is a store before vLLM looks for one.
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_engine_store(wanted.store, config, Tuning(), None)))
        precision = precision_of(folder, wanted.arguments)
        card = card_of(folder, config, wanted.store, precision)
        spool = _spool(wanted.store)
        if wanted.url is None:
            arguments = _arguments(wanted, folder, config, card, spool, precision)
            process = VLLMProcess(
                arguments, _environment(config, wanted.arguments), lambda: os.kill(os.getpid(), signal.SIGTERM)
            )
            client = stack.enter_context(process).client
        else:
            client = VLLMClient(wanted.url, os.environ.get("VLLM_API_KEY"))
            stack.callback(client.close)
        windows = [each for each in (card.window, client.model().get("max_model_len")) if each is not None]
        card = replace(card, window=min(windows, default=None))
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        with closing(open_store(wanted.store, 0, names=config.names_url)) as exact:
            prove_by(client.probe, card, precision, tokenizer, card.window, exact, spool)
        known = AutoConfig.from_pretrained(str(folder)).get_text_config().vocab_size
        library = stack.enter_context(
            VLLMLibrary(card, tokenizer, store, spool, client.warm, config=config, num_embeddings=known)
        )
        wanted.check_store(library)
        yield VLLMBackend(wanted.model, library, client, _own(folder))


def command(wanted: Wanted) -> str:
    """Return the command line that starts vLLM as `open_backend` does, for a server that is given an address of vLLM."""
    if wanted.store is None:
        raise ConfigError(_NO_FOLDER)
    folder, config = model_folder(wanted.model), _config(wanted.config)
    with closing(open_engine_store(wanted.store, config, Tuning(), None)):
        precision = precision_of(folder, wanted.arguments)
        card = card_of(folder, config, wanted.store, precision)
    arguments = _arguments(wanted, folder, config, card, _spool(wanted.store), precision)
    return shlex.join(["python", "-m", "vllm.entrypoints.openai.api_server", *arguments])


def _config(config: EngineConfig) -> EngineConfig:
    # What the server has between the documents of a request: without KV of it a prefix would end after the first.
    return config if config.separator else config.replace(separator=BLANK_LINE)


def _arguments(
    wanted: Wanted, folder: Path, config: EngineConfig, card: ModelCard, spool: Path, precision: Precision = FULL
) -> list[str]:
    assert wanted.store is not None
    transfer = kv_transfer_config(card, wanted.store, ram_bytes=config.ram_bytes, spool=spool, precision=precision)
    return [
        *("--model", str(folder)),
        *("--served-model-name", wanted.model),
        *("--dtype", str(card.dtype).removeprefix("torch.")),
        *("--kv-transfer-config", json.dumps(transfer)),
        # Users' prompts come before what is encoded for the store.
        *("--scheduling-policy", "priority"),
        # It reads the grammars of this package.
        *("--structured-outputs-config", json.dumps({"backend": "guidance"})),
        "--enable-prompt-tokens-details",
        # Our own server has the log of who asked what.
        *("--uvicorn-log-level", "warning"),
        *wanted.arguments,
    ]


def _environment(config: EngineConfig, arguments: Sequence[str]) -> dict[str, str]:
    # Empty where the settings have none, whatever this process's environment has.
    remote = "" if config.remote is None else config.remote.get_secret_value()
    found = {REMOTE_VARIABLE: remote, NAMES_VARIABLE: config.names_url or ""}
    # For connectors' own threads, of which ours has none, vLLM keeps one more core free of a worker's: on two cores it then has
    # none to keep, and each token waits for other work. One is what it keeps without a connector, for a single worker.
    if not any("parallel" in each or each.startswith("-tp") for each in arguments):
        found[_RESERVED] = os.environ.get(_RESERVED, "1")
    return found


def _spool(store: Path) -> Path:
    """Return the folder that vLLM writes to for a store; the same for every process, and in memory where there is a place."""
    name = hashlib.blake2b(str(store.expanduser().resolve()).encode(), digest_size=8).hexdigest()
    above = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return own_folder(above / f"cacheblend-{os.getuid()}-{name}")


def _own(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(str(folder))
    except OSError:
        return GenerationConfig()
