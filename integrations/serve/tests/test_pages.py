"""Pages of answers: for who asked to keep them, for a while, and for nobody else."""

from pathlib import Path

import httpx
import pytest

from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.report import BlendReport
from cacheblend_serve.auth import KeyFile, Owner
from cacheblend_serve.pages import KeptPages
from integrations.serve.tests.conftest import CHUNKS, Serve

ASKED = {"messages": [{"role": "user", "content": "Where was <b>Mara</b> born?"}], "temperature": 0, "max_tokens": 3}


def test_a_page_is_shown_to_who_asked_for_it(engine: BlendEngine, serve: Serve, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    mine, other = (keys.add(Owner("acme", name)) for name in ("mine", "other"))
    client = serve(engine, key=mine, keys=tmp_path / "keys.json", pages_s=60.0)
    client.post("/v1/chunks", json={"chunks": [{"id": id, "text": text} for id, text in CHUNKS.items()]})
    reply = client.post("/v1/chat/completions", json=ASKED | {"documents": list(CHUNKS), "keep": True}).json()
    [address] = reply["pages"]
    with httpx.Client(base_url=client.base_url) as browser:
        page = browser.get(address, auth=("anybody", mine))
        assert page.status_code == 200
        assert "script-src" not in page.headers["Content-Security-Policy"]
        assert "mara" in page.text and "<b>Mara</b>" not in page.text
        assert address in browser.get("/ui", auth=("", mine)).text
        # Not even of the same tenant.
        assert browser.get(address, auth=("mine", other)).status_code == 404
        assert address not in browser.get("/ui", auth=("mine", other)).text
        for refused in (browser.get(address), browser.get("/ui", auth=("mine", "cb-stolen"))):
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"].startswith("Basic")
        # Keys of the other addresses do not come as passwords.
        assert browser.get("/v1/models", auth=("mine", mine)).status_code == 401


def test_a_stream_ends_with_the_address(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine, pages_s=60.0)
    with client.stream("POST", "/v1/chat/completions", json=ASKED | {"keep": True, "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if '"pages"' in line]
    assert len(lines) == 1
    [name] = [word for word in lines[0].split('"') if word.startswith("/ui/")]
    assert client.get(name).status_code == 200


def test_no_page_is_kept_unless_the_server_was_told_to(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    refused = client.post("/v1/chat/completions", json=ASKED | {"keep": True})
    assert refused.status_code == 400
    assert "keeps no pages" in refused.json()["error"]["message"]
    assert "pages" not in client.post("/v1/chat/completions", json=ASKED).json()


def test_pages_come_in_the_order_of_the_prompts(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine, pages_s=60.0)
    prompts = ["Where was Mara born, and when? " * count for count in (40, 1, 20)]
    sizes = [len(engine.prompt_ids(BlendPrompt(prompt))) for prompt in prompts]
    body = {"prompt": prompts, "keep": True, "max_tokens": 2}
    addresses = client.post("/v1/completions", json=body).json()["pages"]
    for address, size in zip(addresses, sizes, strict=True):
        assert f"of {size:,} in the prompt" in client.get(address).text


def test_a_later_key_of_the_same_name_sees_no_pages_of_the_former(engine: BlendEngine, report: BlendReport) -> None:
    pages = KeptPages(10.0)
    name = pages.keep(Owner("acme", "mine", digest="former"), engine, report).removeprefix("/ui/")
    assert pages.page(Owner("acme", "mine", digest="later"), name) is None


@pytest.fixture
def report(engine: BlendEngine) -> BlendReport:
    return engine.generate(BlendPrompt(segments=["Who?"]), 2).report


def test_pages_are_forgotten_in_time_and_in_number(engine: BlendEngine, report: BlendReport) -> None:
    now = [0.0]
    pages = KeptPages(10.0, lambda: now[0])
    mine, other = Owner(None, "mine", digest="a"), Owner(None, "other", digest="b")
    first = pages.keep(mine, engine, report).removeprefix("/ui/")
    now[0] = 9.0
    names = [pages.keep(other, engine, report).removeprefix("/ui/") for _ in range(40)]
    assert pages.page(mine, first) is not None
    assert [pages.page(other, name) is not None for name in names] == [False] * 8 + [True] * 32
    assert pages.index(other).count("<li>") == 32
    now[0] = 10.5
    assert pages.page(mine, first) is None
    assert "listed here" in pages.index(mine)
    now[0] = 30.0
    assert pages.page(other, names[-1]) is None
