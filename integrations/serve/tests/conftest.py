"""A server in a thread of its own, over a tiny random Llama with the reference tokenizer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import LlamaForCausalLM

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_serve.app import make_app
from cacheblend_serve.client.engine import ServedEngine
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.settings import ServeConfig
from tests.families import tiny_reader

CHUNKS = {
    "mara": "Mara Lind was born in Oslo and moved north.",
    "works": "She works at the harbour as a rope maker.",
    "house": "Her house stands behind the old light tower.",
}
Serve = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    return tiny_reader(eos_token_id=None)


def engine_of(model: LlamaForCausalLM, store: Path | None = None, **settings: Any) -> BlendEngine:
    return BlendEngine(model, load_tokenizer(), store=store, **engine_settings(self_check=False, **settings))


@contextmanager
def serving(engine: BlendEngine, **settings: Any) -> Iterator[str]:
    config = ServeConfig(port=0, **settings)
    app = make_app(EngineBackend(engine), config)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5)
    )
    # Only the main thread may say what a signal does.
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    (listener,) = server.servers
    port = listener.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve(tiny: LlamaForCausalLM) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(engine: BlendEngine | None = None, key: str | None = None, **settings: Any) -> httpx.Client:
            used = engine or stack.enter_context(engine_of(tiny))
            address = stack.enter_context(serving(used, **settings))
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return stack.enter_context(httpx.Client(base_url=address, headers=headers, timeout=60))

        yield start


@pytest.fixture
def engine(tiny: LlamaForCausalLM) -> Iterator[BlendEngine]:
    with engine_of(tiny) as engine:
        yield engine


@pytest.fixture
def address(engine: BlendEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture
def served(address: str) -> Iterator[ServedEngine]:
    with ServedEngine(address) as served:
        yield served
