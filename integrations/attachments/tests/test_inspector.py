"""The inspector's page: what it says of every token, and that no text can be more than text."""

import base64
import copy
import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments import InspectorPage, SourceAttention, inspector_page
from cacheblend_attachments.inspector import page_of
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, FixedText
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport, Trace, TracedChunk
from tests.cli.conftest import Command
from tests.cli.conftest import documents as documents
from tests.cli.conftest import model_folder as model_folder
from tests.cli.conftest import run as run
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 17))]
PROMPT = BlendPrompt(words(4, 50), CHUNKS, words(6, 51))
RAM, ENCODED, RECOMPUTED = "KV from RAM", "not stored: encoded first, and kept", "recomputed over its stored KV"


@dataclass
class Element:
    """One element of a page, in which of its views it stands, and all text in it."""

    tag: str
    attributes: dict[str, str | None]
    view: int
    text: str = ""

    def has(self, kind: str) -> bool:
        return kind in (self.attributes.get("class") or "").split()


class Page(HTMLParser):
    """The elements of a page, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        view = sum(each.tag == "main" for each in self.elements) + (tag == "main") - 1
        self.elements.append(Element(tag, dict(attrs), view))
        if tag not in ("meta", "input"):
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for each in self._open:
            each.text += data

    def all(self, kind: str, view: int = 0) -> list[Element]:
        return [each for each in self.elements if each.view == view and (each.tag == kind or each.has(kind))]

    def fates(self, view: int = 0) -> list[str]:
        """What became of each token, as it says of itself."""
        titles = [str(each.attributes["title"]) for each in self.all("t", view)]
        return [title.partition(": ")[2] for title in titles]

    def chunks(self, view: int = 0) -> list[str]:
        return [" ".join(each.text.split()) for each in self.all("header", view)]


def make_engine(store: Path | None = None, prefix_bytes: int = 0) -> BlendEngine:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    asked = {"recompute_ratio": 0.0, "preamble": "", "prefix_bytes": prefix_bytes}
    return BlendEngine(model, tiny_tokenizer(), store=store, **engine_settings(strict=True, self_check=False, **asked))


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with make_engine() as engine:
        yield engine


def test_a_miss_of_a_stream_and_hits_of_many(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:2])
    stream = engine.stream(PROMPT, 5, eos_token_id=None)
    answer = "".join(stream) and stream.result()
    page = Page(inspector_page(engine, answer.report))
    own = page.fates()
    assert Counter(own) == {RAM: 42, ENCODED: 17, "computed": 11}
    assert "".join(each.text for each in page.all("t")) == engine.tokenizer.decode(answer.prompt_ids)
    for chunk, fate in zip(answer.report.trace.chunks, (RAM, RAM, ENCODED), strict=True):  # type: ignore[union-attr]
        assert set(own[chunk.start : chunk.stop]) == {fate}
    assert {"Queue", "Open", "Encode"} < {each.text for each in page.all("span")}
    assert page.all("differs") == []
    many = engine.generate_many([PROMPT, BlendPrompt(words(4, 60), CHUNKS, words(6, 61))], 5, eos_token_id=None)
    assert many[0].report.batch_size == 2
    for answer in many:
        page = Page(inspector_page(engine, answer.report))
        assert Counter(page.fates()) == {RAM: 59, "computed": 11}
        assert page.all("answer")[0].text == engine.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("selector", ["hkvd", "a3", "boundary"])
def test_what_a_selector_recomputes(engine: BlendEngine, selector: str) -> None:
    engine.add(CHUNKS)
    engine.attach(SourceAttention())
    report = engine.generate(PROMPT, 3, blend=BlendConfig(selector=selector, recompute_ratio=0.2)).report
    page = Page(inspector_page(engine, report))
    assert page.fates().count(RECOMPUTED) == report.recomputed_tokens > 0
    assert page.fates().count("computed") == 11
    for shown, said in zip(page.chunks(), report.chunks, strict=True):
        assert not said.recomputed_tokens or f"{RECOMPUTED}: {said.recomputed_tokens}" in shown
    shares = [float(str(each.attributes["value"])) for each in page.all("meter")]
    assert shares[:3] == pytest.approx([each.attention for each in report.chunks]) and sum(shares) == pytest.approx(1)


def test_a_fixed_head_and_what_an_earlier_prompt_begins_with(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    prompt = BlendPrompt(FixedText(words(60, 70)), CHUNKS, words(6, 51))
    first, second = (engine.generate(prompt, 2).report for _ in range(2))
    before, after = (Page(inspector_page(engine, report)).fates() for report in (first, second))
    assert before[: second.head_tokens] == [ENCODED] * second.head_tokens
    assert after[: second.head_tokens] == ["fixed head, KV stored"] * second.head_tokens
    assert after.count("fixed head, KV stored") == second.head_tokens > 0
    with make_engine(prefix_bytes=2**26) as other:
        other.add(CHUNKS)
        other.generate(PROMPT, 4)
        report = other.generate(BlendPrompt(segments=[*PROMPT.segments, words(9, 60)]), 4).report
        own = Page(inspector_page(other, report)).fates()
        assert own.count("KV from an earlier prompt") == report.prefix_tokens > 59
        assert own[-1] == "computed"


def test_full_prefill_beside_it(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    blended = engine.generate(PROMPT, 8, eos_token_id=None)
    full = engine.generate(PROMPT, 8, blend=BlendConfig(enabled=False), eos_token_id=None)
    page = Page(inspector_page(engine, blended.report, full.report))
    assert set(page.fates(1)) == {"computed"} != set(page.fates(0))
    assert "All layers" in {each.text for each in page.all("span", 1)}
    pairs = zip(blended.token_ids, full.token_ids, strict=True)
    differs = next(number for number, (one, other) in enumerate(pairs) if one != other)
    for view, answer in enumerate((blended, full)):
        [marked] = page.all("differs", view)
        before = engine.tokenizer.decode(answer.token_ids[:differs])
        assert page.all("answer", view)[0].text.startswith(before + marked.text)
    assert Page(inspector_page(engine, full.report, full.report)).all("differs") == []
    other = engine.generate(BlendPrompt(words(3, 9), CHUNKS, words(4, 8)), 2)
    with pytest.raises(ConfigError, match="another prompt"):
        inspector_page(engine, blended.report, other.report)


def test_what_a_chunk_was_read_behind_is_told_by_ids(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        pieces = [Chunk(words(9 + seed, 80 + seed), f"d-{seed}", document="tales") for seed in range(4)]
        engine.add([*pieces, CHUNKS[0]])
        report = engine.generate(BlendPrompt(words(4, 50), ["d-2", "n0", "d-0"], words(6, 51)), 2).report
        page = inspector_page(engine, report)
        first, alone, later = Page(page).chunks()
        assert first.startswith("d-2 of tales")
        # A passage of the package's own is no chunk.
        assert " of tales" not in alone and "neutral passage" in alone
        [record] = engine.records(["d-0"])
        assert record is not None and record.later is not None
        seen = [id for id, _ in record.later.seen]
        assert seen and set(seen) < {"d-1", "d-2", "d-3"}
        assert f"read behind {len(record.later.behind)} tokens of chunks: {', '.join(seen)}." in later
        # The text of what was not retrieved is nowhere.
        assert pieces[1].text not in page and pieces[3].text not in page
        engine.delete(seen)
        assert "no longer known" in Page(inspector_page(engine, report)).chunks()[2]


def test_a_report_that_left_its_process_has_no_page_and_no_texts(engine: BlendEngine) -> None:
    report = engine.generate(PROMPT, 2).report
    assert "trace" not in report.to_dict() and "trace" not in repr(report)
    for moved in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report), BlendReport(**report.to_dict())):
        with pytest.raises(ConfigError):
            inspector_page(engine, moved)


MARKS = ["</style>", "<!--", "<script>", "]]>", "-->", "<", ">", "&lt;", '"', "'", "\\", "\u2028", "\x85", "{{", "%}"]
HOSTILE = st.text(max_size=30) | st.lists(st.sampled_from(MARKS)).map("".join)


class _Written:
    """A tokenizer with texts that nobody's made."""

    def __init__(self, texts: list[str]) -> None:
        self.all = texts

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.all[number] for number in ids)


def page_about(texts: list[str], id: str, reason: str) -> InspectorPage:
    chunk = TracedChunk(0, 1, id, "key", 3, None, reason, 0.5)
    ids = tuple(range(len(texts)))
    trace = Trace(ids, ids[:1], (chunk,), (), (), 0.0, 1.0, 2.0, (), None, (2.0,))
    report = BlendReport(1, 0, 0, 1, len(ids), 1, 0, 0, 0, 1, 0, "none", fallback_reason=reason, trace=trace)
    return page_of(_Written(texts), [(report.to_dict(), trace, [{"document": id, "seen": [id, texts[0]]}])])


@given(st.lists(HOSTILE, min_size=2, max_size=6), HOSTILE.filter(bool), HOSTILE.filter(bool))
@settings(max_examples=150)
def test_no_text_is_more_than_text(texts: list[str], id: str, reason: str) -> None:
    page = page_about(texts, id, reason)
    found, plain = Page(page), Page(page_about(["x"] * len(texts), "x", "x"))
    assert [each.tag for each in found.elements] == [each.tag for each in plain.elements]
    assert [each.attributes.keys() for each in found.elements] == [each.attributes.keys() for each in plain.elements]
    assert "".join(each.text for each in found.all("t")) == "".join(texts)
    [header] = found.all("header")
    assert header.text.startswith(f"{id} of {id}")
    assert f"{reason}." in header.text and f": {id}, {texts[0]}." in header.text
    # Only the page's own style is let in: no script, no other style and no image.
    [policy] = [str(each.attributes["content"]) for each in found.all("meta", -1) if "http-equiv" in each.attributes]
    [style] = found.all("style", -1)
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    frame = page._repr_html_()
    assert frame.count("<") == 2 and frame.count(">") == 2
    assert 'sandbox=""' in frame


def test_the_command_writes_a_page_where_it_can(
    run: Command, documents: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    run("warm", documents, "--library", store, "--model", model_folder, "--chunk-tokens", "40")
    monkeypatch.chdir(tmp_path)
    options = ["--library", store, "--top-k", "3", "--max-new-tokens", "5"]
    run("inspect", "Where was Mara born?", *options, "--full", "--attention")
    page = Page((tmp_path / "inspect.html").read_text(encoding="utf-8"))
    assert len([each for each in page.elements if each.tag == "label"]) == 2
    assert len(page.chunks()) == len(page.chunks(1)) == 3
    assert any("of chunks: " in said for said in page.chunks())
    assert all(" of " in said and "% of the attention" in said for view in (0, 1) for said in page.chunks(view))
    assert "Where was Mara born?" in page.all("question")[0].text
    missing = tmp_path / "nowhere" / "page.html"
    assert "does not exist" in run("inspect", "Where?", "--library", store, "--html", missing, code=2).stderr
