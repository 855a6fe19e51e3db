"""What answers behind the server: chosen by name, and not always there."""

from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi.testclient import TestClient
from typer.testing import CliRunner

from cacheblend_attachments import CompareAnswers
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.cli.app import app
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendEngine, ChunkLibrary
from cacheblend_rag.errors import BackendError
from cacheblend_serve.app import make_app
from cacheblend_serve.backend import Asked, Wanted
from cacheblend_serve.inprocess import EngineBackend, open_backend
from cacheblend_serve.settings import ServeConfig

HERE = "http://127.0.0.1"


def test_a_backend_that_is_not_installed_is_refused_with_those_that_are() -> None:
    said = CliRunner().invoke(app, ["serve", "--model", "reference", "--backend", "vlm"])
    assert said.exit_code == 2
    assert "engine" in said.stderr


def test_the_engine_is_opened_with_the_settings_that_are_wanted(tmp_path: Path) -> None:
    config, blend = EngineConfig(tenant="mara", separator="\n"), BlendConfig(recompute_ratio=0.25)
    with open_backend(Wanted("reference", tmp_path / "kv", config, blend)) as backend:
        engine = backend.library(None)
        assert isinstance(engine, BlendEngine)
        assert (engine.config.tenant, engine.config.separator, engine.blend.recompute_ratio) == ("mara", "\n", 0.25)
        assert backend.library("mara") is engine
        other = backend.library("dorla")
        assert other is backend.library("dorla")
        assert other.config.tenant == "dorla"


def test_what_is_attached_where_settings_say_so(engine: BlendEngine) -> None:
    make_app(EngineBackend(engine), ServeConfig(compare_every=2))
    assert [type(each) for each in engine.attachments] == [CompareAnswers]
    assert engine.metrics.registry.get_sample_value("cacheblend_compared_answers_total", {"outcome": "same"}) == 0


class Lost(EngineBackend):
    """One whose model is elsewhere, and gone."""

    def is_ready(self) -> bool:
        return False

    async def answer(self, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[str | Answer, None]:
        raise BackendError("the machine at 10.0.0.7 has ended")
        yield ""


def test_clients_are_told_to_come_again_while_the_backend_is_gone(engine: BlendEngine) -> None:
    with TestClient(make_app(Lost(engine)), base_url=HERE) as client:
        assert (client.get("/readyz").status_code, client.get("/readyz").json()) == (503, {"status": "failing"})
        assert client.get("/healthz").status_code == 200
        reply = client.post("/v1/completions", json={"prompt": "Who?"})
    assert reply.status_code == 503
    assert reply.headers["Retry-After"]
    # Where it is stands in the log only.
    assert "10.0.0.7" not in reply.text
