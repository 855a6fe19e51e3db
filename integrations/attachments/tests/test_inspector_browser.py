"""The inspector's page in a real browser: Debian's chromium, without which these tests are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_attachments import InspectorPage, SourceAttention, inspector_page
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from tests.families import tiny_model, tiny_tokenizer, words

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

ATTACK = (
    "</style><script>document.title='owned'</script><!-- <img src=x onerror=\"document.title='owned'\"> "
    "<style>body{display:none}</style> <iframe src=https://example.org></iframe> <b>bold</b> {{ 1 }} &lt;i&gt;"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Its sandbox refuses to be root's; every page here is this test's own.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        with closing(driver.chromium.launch(executable_path=CHROMIUM, args=options)) as browser:
            yield browser


@pytest.fixture(scope="module")
def pages() -> tuple[InspectorPage, InspectorPage]:
    """An answer behind a chunk and a miss, with full prefill beside it; and one behind a chunk that is an attack."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    settings = engine_settings(strict=True, self_check=False, selector="hkvd", recompute_ratio=0.15)
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        engine.add([Chunk(words(20, 2), "stored")])
        prompt = BlendPrompt(words(4, 50), ["stored", Chunk(words(17, 9), "new")], words(6, 51))
        with closing(engine.attach(SourceAttention())):
            shown = engine.generate(prompt, 8, eos_token_id=None)
        full = engine.generate(prompt, 8, blend=BlendConfig(enabled=False), eos_token_id=None)
        attack = BlendPrompt(words(4, 1), [Chunk(words(9, 2), ATTACK, document=ATTACK)], words(3, 3))
        hostile = inspector_page(engine, engine.generate(attack, 2).report)
        return inspector_page(engine, shown.report, full.report), hostile


def opened(browser: Any, text: str, file: Path, **options: Any) -> tuple[Any, list[str]]:
    """Open a page; return it, and what it asks for or complains of."""
    file.write_text(text, encoding="utf-8")
    page = browser.new_page(**options)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.goto(file.as_uri())
    assert seen.pop(0) == file.as_uri()
    return page, seen


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_one_answer_is_shown_at_a_time_and_fits_the_screen(
    browser: Any, pages: tuple[InspectorPage, ...], tmp_path: Path, size: tuple[int, int]
) -> None:
    page, seen = opened(browser, pages[0], tmp_path / "page.html", viewport={"width": size[0], "height": size[1]})

    def shown() -> list[bool]:
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        return [page.locator(f"main.view{number}").is_visible() for number in (1, 2)]

    assert shown() == [True, False]
    assert page.locator(".view1 .f-recomputed").first.is_visible()
    page.get_by_label("Full prefill").click()
    assert shown() == [False, True]
    page.keyboard.press("ArrowLeft")
    assert shown() == [True, False]
    assert seen == []
    page.close()


def test_markup_and_scripts_show_as_text_and_in_a_notebook_in_a_frame(
    browser: Any, pages: tuple[InspectorPage, ...], tmp_path: Path
) -> None:
    page, seen = opened(browser, pages[1], tmp_path / "page.html")
    assert page.title() == "cacheblend-rag inspector"
    assert page.locator("article header b").inner_text() == ATTACK
    assert page.evaluate("document.querySelectorAll('img, iframe, script, b b, main style').length") == 0
    assert page.evaluate("document.querySelector('meta[http-equiv]').content").startswith(
        "default-src 'none'; style-src 'sha"
    )
    assert seen == []
    page.set_content(f"<div>{pages[1]._repr_html_()}</div>")
    header = page.frame_locator("iframe").locator("article header b")
    header.wait_for()
    assert header.inner_text() == ATTACK
    page.close()
