"""The inspector's page in a real browser: Debian's chromium, without which these tests are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_attachments import SourceAttention, inspector_page
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from tests.families import tiny_model, tiny_tokenizer, words

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

SIZES = {"desk": (1440, 900), "phone": (390, 844)}
ATTACK = (
    "</style><script>document.title='owned'</script><!-- <img src=x onerror=\"document.title='owned'\"> "
    "<style>body{display:none}</style> <iframe src=https://example.org></iframe> <b>bold</b> {{ 1 }} &lt;i&gt;"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Its sandbox refuses to be root's; every page here is this test's own.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


def opened(browser: Any, file: Path, size: str = "desk", scheme: str = "light") -> tuple[Any, list[str]]:
    """Open a page; return it, and what it asks for or complains of."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.goto(file.as_uri())
    return page, seen


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    settings = engine_settings(strict=True, self_check=False, selector="hkvd", recompute_ratio=0.15)
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def file(engine: BlendEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a chunk right behind the preamble, a miss, a chunk that was read behind others, and full prefill beside it."""
    engine.add([Chunk(words(20, seed), f"d-{seed}", document="tales") for seed in range(3)])
    prompt = BlendPrompt(words(4, 50), ["d-2", Chunk(words(17, 9), "new"), "d-0"], words(6, 51))
    with closing(engine.attach(SourceAttention())):
        shown = engine.generate(prompt, 8, eos_token_id=None)
    full = engine.generate(prompt, 8, blend=BlendConfig(enabled=False), eos_token_id=None)
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(inspector_page(engine, shown.report, full.report), encoding="utf-8")
    return path


def test_one_answer_is_shown_at_a_time_and_the_keyboard_switches(browser: Any, file: Path) -> None:
    page, seen = opened(browser, file)
    first, second = page.locator("main.view1"), page.locator("main.view2")
    assert (first.is_visible(), second.is_visible()) == (True, False)
    assert page.locator(".view1 .f-recomputed").first.is_visible()
    page.get_by_label("Full prefill").click()
    assert (first.is_visible(), second.is_visible()) == (False, True)
    page.keyboard.press("ArrowLeft")
    assert (first.is_visible(), second.is_visible()) == (True, False)
    bars = page.locator(".view1 .lane rect")
    boxes = [bars.nth(number).bounding_box() for number in range(bars.count())]
    lane = page.locator(".view1 .lane svg").first.bounding_box()
    assert len(boxes) > 8
    assert all(
        lane["x"] - 1 <= each["x"] <= each["x"] + each["width"] <= lane["x"] + lane["width"] + 1 for each in boxes
    )
    assert seen == [file.as_uri()]
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_the_screen_and_can_be_read(browser: Any, file: Path, size: str, scheme: str) -> None:
    page, _ = opened(browser, file, size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    # Contrast of each kind of text against what is behind it, as WCAG counts it.
    contrasts = page.evaluate(
        """() => {
            const light = (text) => {
                const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
                    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (element) => {
                for (; element; element = element.parentElement) {
                    const color = getComputedStyle(element).backgroundColor;
                    if (!/, 0\\)$/.test(color)) return color;
                }
            };
            const probes = [...document.querySelectorAll(".note, h2, dd, dt, small, header span, .lane > span, label")];
            for (const fate of ["computed", "recomputed", "encoded", "device", "ram", "disk", "remote", "head", "prefix"]) {
                const token = document.createElement("span");
                token.className = `t f-${fate}`;
                document.querySelector(".prompt").append(token);
                probes.push(token);
            }
            return probes.map((each) => {
                const pair = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
                return [each.className || each.tagName, (pair[0] + 0.05) / (pair[1] + 0.05)];
            });
        }"""
    )
    assert min(contrasts, key=lambda pair: pair[1])[1] >= 4.5, sorted(contrasts, key=lambda pair: pair[1])[:3]
    page.close()


def test_markup_and_scripts_show_as_text(browser: Any, engine: BlendEngine, tmp_path: Path) -> None:
    report = engine.generate(
        BlendPrompt(words(4, 1), [Chunk(words(9, 2), ATTACK, document=ATTACK)], words(3, 3)), 2
    ).report
    path = tmp_path / "hostile.html"
    path.write_text(inspector_page(engine, report), encoding="utf-8")
    page, seen = opened(browser, path)
    assert page.title() == "cacheblend-rag inspector"
    assert page.locator("article header b").inner_text() == ATTACK
    assert page.evaluate("document.querySelectorAll('img, iframe, script, b b, main style').length") == 0
    assert seen == [path.as_uri()]
    page.close()


def test_a_notebook_shows_it_in_a_frame(browser: Any, engine: BlendEngine) -> None:
    report = engine.generate(BlendPrompt(words(4, 50), [Chunk(words(17, 9), "new")], words(6, 51)), 4).report
    page = browser.new_page()
    page.set_content(f"<div>{inspector_page(engine, report)._repr_html_()}</div>")
    header = page.frame_locator("iframe").locator("article header")
    header.wait_for()
    assert "new" in header.inner_text()
    page.close()
