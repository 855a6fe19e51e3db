"""``cacheblend-rag serve --backend vllm``: what it takes to answer with vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.config import Tuning
from cacheblend_rag.engine.library import open_engine_store
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model.checkpoint import model_folder
from cacheblend_serve.backend import Wanted
from vllm_cacheblend.asking import NAMES_VARIABLE, REMOTE_VARIABLE, SERVER_VARIABLE, kv_transfer_config
from vllm_cacheblend.backend import VLLMBackend, check_ratio
from vllm_cacheblend.cards import card_of, precision_of
from vllm_cacheblend.engine import VLLMEngine
from vllm_cacheblend.library import VLLMLibrary

__all__ = ["open_backend"]


@contextmanager
def open_backend(wanted: Wanted) -> Iterator[VLLMBackend]:
    """Start vLLM over the store; it ends when the context is left."""
    check_ratio(wanted.blend.recompute_ratio)
    if wanted.store is None:
        raise ConfigError(
            "vLLM takes KV from a folder that it shares with the server; give one by --store, or use --backend engine"
        )
    folder, config = model_folder(wanted.model), wanted.config
    if not config.separator:
        # What the server has between the documents of a request: without KV of it a prefix would end after the first.
        config = config.replace(separator=BLANK_LINE)
    arguments = _arguments(folder, wanted.arguments)
    precision = precision_of(folder, arguments.quantization, arguments.kv_cache_dtype)
    # Opened first, so that the folder is a store before vLLM looks for one.
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_engine_store(wanted.store, config, Tuning(), None)))
        card = card_of(folder, config, wanted.store, precision)
        if arguments.dtype == "auto":
            arguments.dtype = str(card.dtype).removeprefix("torch.")
        transfer = kv_transfer_config(card, wanted.store, ram_bytes=config.ram_bytes, precision=precision)
        arguments.kv_transfer_config = KVTransferConfig(**transfer)
        # Empty where the settings have none, whatever this process's environment has.
        os.environ[REMOTE_VARIABLE] = "" if config.remote is None else config.remote.get_secret_value()
        os.environ[NAMES_VARIABLE] = config.names_url or ""
        os.environ[SERVER_VARIABLE] = str(os.getpid())
        # A fork would have this process's locks as its threads hold them.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        engine = stack.enter_context(VLLMEngine(arguments))
        card = replace(card, window=min(engine.window, card.window or engine.window))
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        known = AutoConfig.from_pretrained(str(folder)).get_text_config().vocab_size
        library = stack.enter_context(
            VLLMLibrary(card, tokenizer, store, engine.warm, config=config, num_embeddings=known)
        )
        wanted.check_store(library)
        yield VLLMBackend(wanted.model, library, engine)


def _arguments(folder: Path, given: Sequence[str]) -> AsyncEngineArgs:
    """Return what vLLM is started with; `ConfigError` if it does not know something of what was given."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    own = ["--model", str(folder), "--scheduling-policy", "priority", "--disable-log-stats"]
    # Users' prompts come before what is encoded for the store, and it reads the grammars of this package.
    own += ["--structured-outputs-config.backend", "guidance"]
    try:
        return AsyncEngineArgs.from_cli_args(parser.parse_args([*own, *given]))
    except SystemExit as error:
        raise ConfigError(
            f"vLLM does not take the arguments {' '.join(given)}; what it printed above says why"
        ) from error
