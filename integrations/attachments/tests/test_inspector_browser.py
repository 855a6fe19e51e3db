"""The inspector's page in a real browser: Debian's chromium, without which these tests are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
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

SIZES = {"laptop": (1280, 800), "desk": (1440, 900), "phone": (390, 844)}
ATTACK = (
    "</script><script>document.title='owned'</script><!-- <img src=x onerror=\"document.title='owned'\"> "
    "<style>body{display:none}</style> <iframe src=https://example.org></iframe> <b>bold</b> ${data} &lt;i&gt;"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Its sandbox refuses to be root's; every page here is this test's own.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page that is open, what it asked for and what it complained of."""

    page: Any
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def is_quiet(self, file: Path) -> bool:
        return self.asked == [file.as_uri()] and not self.said


def opened(browser: Any, file: Path, size: str = "laptop", scheme: str = "light") -> Opened:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    seen = Opened(page)
    page.on("request", lambda request: seen.asked.append(request.url))
    page.on("console", lambda message: seen.said.append(message.text))
    page.on("pageerror", lambda error: seen.said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    return seen


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
    pieces = [Chunk(words(20, seed), f"d-{seed}", document="tales") for seed in range(3)]
    engine.add(pieces)
    prompt = BlendPrompt(words(4, 50), ["d-2", Chunk(words(17, 9), "new"), "d-0"], words(6, 51))
    with closing(engine.attach(SourceAttention())):
        shown = engine.generate(prompt, 8, eos_token_id=None)
    answers = [shown, engine.generate(prompt, 8, blend=BlendConfig(enabled=False), eos_token_id=None)]
    assert answers[0].token_ids != answers[1].token_ids
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(inspector_page(engine, *(each.report for each in answers)), encoding="utf-8")
    return path


def test_a_token_a_chunk_and_full_prefill(browser: Any, file: Path) -> None:
    seen = opened(browser, file)
    page, details = seen.page, seen.page.locator("#detail-text")
    page.locator('[data-chunk="0"] .t').nth(3).hover()
    assert "Token 8" in details.inner_text()
    assert "right behind the preamble" in details.inner_text()
    page.locator('[data-chunk="1"] header').hover()
    assert "new" in details.inner_text() and "tokens of a neutral passage" in details.inner_text()
    page.locator('[data-chunk="2"] header').hover()
    assert "read behind 20 tokens of chunks: d-" in details.inner_text()
    assert "not stored: encoded first" in page.locator("#legend").inner_text()
    recomputed = page.locator(".t.f-recomputed").count()
    assert recomputed
    assert page.locator(".lane").count() >= 6
    assert page.locator("#attention-section").is_visible()
    assert "differ from token" in page.locator("#differs").inner_text()
    marked = page.locator("#answer .differs").inner_text()
    page.get_by_role("button", name="Full prefill").click()
    assert page.get_by_role("button", name="Full prefill").get_attribute("aria-pressed") == "true"
    assert page.locator(".t.f-computed").count() == page.locator(".t").count()
    assert page.locator("#answer .differs").inner_text() != marked
    assert "(full prefill)" in page.locator("#headline").inner_text()
    page.get_by_role("button", name="This answer").click()
    assert page.locator(".t.f-recomputed").count() == recomputed
    assert seen.is_quiet(file)
    page.close()


def test_the_keyboard_reaches_every_chunk_and_token(browser: Any, file: Path) -> None:
    seen = opened(browser, file)
    page, details = seen.page, seen.page.locator("#detail-text")
    for _ in range(3):
        page.keyboard.press("Tab")
    assert details.inner_text().startswith("d-2 of tales")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert details.inner_text().startswith("Token 6 ")
    page.keyboard.press("ArrowLeft")
    assert details.inner_text().startswith("Token 5 ")
    page.keyboard.press("Tab")
    assert details.inner_text().startswith("new")
    assert seen.is_quiet(file)
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_the_screen_and_can_be_read(browser: Any, file: Path, size: str, scheme: str) -> None:
    seen = opened(browser, file, size, scheme)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    # Contrast of each kind of text against what is behind it, as WCAG counts it.
    contrasts = seen.page.evaluate(
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
            const probes = [...document.querySelectorAll(".note, h2, dd, dt, .chunk header span, .lane > span, #switch button")];
            for (const fate of ["computed", "recomputed", "encoded", "device", "ram", "disk", "remote", "head", "prefix"]) {
                const token = document.createElement("span");
                token.className = `t f-${fate}`;
                document.getElementById("prompt").append(token);
                probes.push(token);
            }
            return probes.map((each) => {
                const pair = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
                return [each.className || each.tagName, (pair[0] + 0.05) / (pair[1] + 0.05)];
            });
        }"""
    )
    assert min(contrasts, key=lambda pair: pair[1])[1] >= 4.5, sorted(contrasts, key=lambda pair: pair[1])[:3]
    assert seen.is_quiet(file)
    seen.page.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a prompt and ids that are markup and scripts, which the reference model reads."""
    settings = engine_settings(self_check=False)
    with BlendEngine.from_pretrained("reference", **settings) as engine:
        engine.add([Chunk(ATTACK, ATTACK, document=ATTACK), Chunk("More.", "more", document=ATTACK)])
        report = engine.generate(BlendPrompt("Read this.\n", ["more", ATTACK], f"\n{ATTACK}"), 4).report
    path = tmp_path_factory.mktemp("page") / "hostile.html"
    path.write_text(inspector_page(engine, report), encoding="utf-8")
    return path


def test_markup_and_scripts_show_as_text(browser: Any, hostile: Path) -> None:
    seen = opened(browser, hostile)
    page = seen.page
    assert page.title() == "cacheblend-rag inspector"
    assert page.locator('[data-chunk="1"] .rows').inner_text().strip() == ATTACK
    assert ATTACK in page.locator('[data-chunk="1"] header').inner_text()
    assert page.locator("#question").inner_text() == ATTACK
    assert page.evaluate("document.querySelectorAll('img, iframe, b b, #prompt style, #prompt script').length") == 0
    assert seen.is_quiet(hostile)
    page.close()


def test_a_notebook_shows_it_in_a_frame(browser: Any, engine: BlendEngine) -> None:
    report = engine.generate(BlendPrompt(words(4, 50), [Chunk(words(17, 9), "new")], words(6, 51)), 4).report
    page = browser.new_page()
    page.set_content(f"<div>{inspector_page(engine, report)._repr_html_()}</div>")
    frame = page.frame_locator("iframe")
    frame.locator('[data-chunk="0"]').wait_for()
    assert "new" in frame.locator('[data-chunk="0"] header').inner_text()
    page.close()
