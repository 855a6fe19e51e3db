"""The inspector's page: what it says of every token, and that no text can be more than text."""

import copy
import hashlib
import json
import pickle
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments import SourceAttention, inspector_page
from cacheblend_attachments.inspector import page_of
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, FixedText
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.trace import Trace, TracedChunk
from tests.cli.conftest import Command
from tests.cli.conftest import documents as documents
from tests.cli.conftest import model_folder as model_folder
from tests.cli.conftest import run as run
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 17))]
PROMPT = BlendPrompt(words(4, 50), CHUNKS, words(6, 51))
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
FULL = BlendConfig(enabled=False)


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.findall(page)[0])
    return found


def fates(view: dict[str, Any]) -> list[str]:
    return [fate for fate, count in view["fates"] for _ in range(count)]


def make_engine(store: Path | None = None, prefix_bytes: int = 0) -> BlendEngine:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096
    asked = {"recompute_ratio": 0.0, "preamble": "", "prefix_bytes": prefix_bytes}
    settings = engine_settings(strict=True, self_check=False, **asked)
    return BlendEngine(model, tiny_tokenizer(), store=store, **settings)


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with make_engine() as engine:
        yield engine


def test_a_miss_and_a_hit(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:2])
    answer = engine.generate(PROMPT, 5, eos_token_id=None)
    data = data_of(inspector_page(engine, answer.report))
    [view] = data["views"]
    own = fates(view)
    assert Counter(own) == {"ram": 42, "encoded": 17, "computed": 11}
    assert "".join(data["tokens"]) == engine.tokenizer.decode(answer.prompt_ids)
    assert "".join(view["answer"]) == engine.tokenizer.decode(answer.token_ids)
    for chunk, fate in zip(view["chunks"], ("ram", "ram", "encoded"), strict=True):
        assert set(own[chunk["start"] : chunk["stop"]]) == {fate}
    assert [chunk["reason"] is None for chunk in view["chunks"]] == [True, True, False]
    assert {wait[0] for wait in view["waits"]} == {"queue", "open", "encode"}
    assert data["differs"] is None
    again = data_of(inspector_page(engine, engine.generate(PROMPT, 5).report))
    assert Counter(fates(again["views"][0])) == {"ram": 59, "computed": 11}


@pytest.mark.parametrize("selector", ["hkvd", "query", "boundary"])
def test_what_a_selector_recomputes(engine: BlendEngine, selector: str) -> None:
    engine.add(CHUNKS)
    engine.attach(SourceAttention())
    blend = BlendConfig(selector=selector, recompute_ratio=0.2)
    report = engine.generate(PROMPT, 3, blend=blend).report
    [view] = data_of(inspector_page(engine, report))["views"]
    own = fates(view)
    assert own.count("recomputed") == report.recomputed_tokens > 0
    assert own.count("computed") == 11
    for chunk, said in zip(view["chunks"], report.chunks, strict=True):
        assert own[chunk["start"] : chunk["stop"]].count("recomputed") == said.recomputed_tokens
        assert chunk["attention"] == said.attention is not None


def test_a_head_that_is_computed_and_one_that_is_stored(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    prompt = BlendPrompt(FixedText(words(60, 70)), CHUNKS, words(6, 51))
    first, second = (engine.generate(prompt, 2).report for _ in range(2))
    assert second.head_tokens
    before, after = (fates(data_of(inspector_page(engine, report))["views"][0]) for report in (first, second))
    assert before[: second.head_tokens] == ["encoded"] * second.head_tokens
    assert after[: second.head_tokens] == ["head"] * second.head_tokens
    assert after.count("head") == second.head_tokens


def test_what_an_earlier_prompt_begins_with() -> None:
    with make_engine(prefix_bytes=2**26) as engine:
        engine.add(CHUNKS)
        engine.generate(PROMPT, 4)
        report = engine.generate(BlendPrompt(segments=[*PROMPT.segments, words(9, 60)]), 4).report
        own = fates(data_of(inspector_page(engine, report))["views"][0])
        assert own.count("prefix") == report.prefix_tokens > 59
        assert own[-1] == "computed"


def test_full_prefill_beside_it(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    blended = engine.generate(PROMPT, 8, eos_token_id=None)
    full = engine.generate(PROMPT, 8, blend=FULL, eos_token_id=None)
    assert blended.token_ids != full.token_ids
    data = data_of(inspector_page(engine, blended.report, full.report))
    assert [view["full"] for view in data["views"]] == [False, True]
    assert set(fates(data["views"][1])) == {"computed"}
    assert data["views"][1]["layers"] == []
    pairs = zip(blended.token_ids, full.token_ids, strict=True)
    assert data["differs"] == next(number for number, (one, other) in enumerate(pairs) if one != other)
    assert data_of(inspector_page(engine, full.report, full.report))["differs"] is None
    other = engine.generate(BlendPrompt(words(3, 9), CHUNKS, words(4, 8)), 2)
    with pytest.raises(ConfigError, match="another prompt"):
        inspector_page(engine, blended.report, other.report)


def test_many_prompts_and_a_stream(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:2])
    prompts = [BlendPrompt(words(4, seed), CHUNKS, words(6, seed + 1)) for seed in (50, 60, 70)]
    answers = engine.generate_many(prompts, 4, eos_token_id=None)
    assert answers[0].report.batch_size == 3
    for answer in answers:
        [view] = data_of(inspector_page(engine, answer.report))["views"]
        assert Counter(fates(view)) == {"ram": 42, "encoded": 17, "computed": 11}
        assert len(view["times"]) == 4
        assert view["forward"][1] <= view["times"][0]
    stream = engine.stream(prompts[0], 4, eos_token_id=None)
    assert "".join(stream) == answers[0].text
    assert (
        data_of(inspector_page(engine, stream.result().report))["views"][0]["answer"]
        == data_of(inspector_page(engine, answers[0].report))["views"][0]["answer"]
    )


def test_what_a_chunk_was_read_behind_is_told_by_ids(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        pieces = [Chunk(words(9 + seed, 80 + seed), f"d-{seed}", document="tales") for seed in range(4)]
        engine.add([*pieces, CHUNKS[0]])
        report = engine.generate(BlendPrompt(words(4, 50), ["d-2", "n0", "d-0"], words(6, 51)), 2).report
        page = inspector_page(engine, report)
        first, alone, later = data_of(page)["views"][0]["chunks"]
        assert (first["document"], first["behind"], first["seen"]) == ("tales", 0, [])
        # A passage of the package's own is no chunk.
        assert (alone["document"], alone["seen"]) == (None, []) and alone["behind"] > 0
        [record] = engine.records(["d-0"])
        assert record is not None and record.later is not None
        seen = [id for id, _ in record.later.seen]
        assert seen and set(seen) < {"d-1", "d-2", "d-3"}
        assert (later["document"], later["behind"], later["seen"]) == ("tales", len(record.later.behind), seen)
        # The text of what was not retrieved is nowhere.
        assert pieces[1].text not in page and pieces[3].text not in page
        engine.delete(seen)
        first, _, later = data_of(inspector_page(engine, report))["views"][0]["chunks"]
        assert (later["seen"], later["behind"]) == (None, len(record.later.behind))
        assert first["seen"] == []
    # When the engine is closed the page has all but this.
    first, _, later = data_of(inspector_page(engine, report))["views"][0]["chunks"]
    assert (first["id"], first["seen"], first["document"]) == ("d-2", [], None)
    assert (later["id"], later["seen"]) == ("d-0", None)


def test_a_report_that_left_its_process_has_no_page(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    report = engine.generate(PROMPT, 2).report
    assert report.trace is not None
    assert "trace" not in report.to_dict() and "trace" not in repr(report)
    for moved in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report), BlendReport(**report.to_dict())):
        assert moved.trace is None
        with pytest.raises(ConfigError, match="copied"):
            inspector_page(engine, moved)
    assert copy.deepcopy(report) == report


def test_nothing_is_loaded_from_elsewhere(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    page = inspector_page(engine, engine.generate(PROMPT, 2).report)
    shown = DATA.sub("", page)
    assert not re.search(r"https?://|//\w|\ssrc=|href=|url\(|@import|innerHTML|outerHTML|insertAdjacent|eval\(", shown)
    assert "unsafe" not in page
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';")
    for kind, text in (
        ("style", re.findall(r"<style>(.*?)</style>", page, re.DOTALL)),
        ("script", re.findall(r"<script>(.*?)</script>", page, re.DOTALL)),
    ):
        digest = b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert len(text) == 1 and f"{kind}-src 'sha256-{digest}'" in policy


HOSTILE = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(
            ["</script>", "<!--", "<script>", "]]>", "-->", "<", ">", "&lt;", '"', "'", "\\", "\u2028", "\x00", "$data"]
        )
    ).map("".join),
)


class _Written:
    """A tokenizer with texts that nobody's made."""

    def __init__(self, texts: list[str]) -> None:
        self.all = texts

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.all[number] for number in ids)


@given(st.lists(HOSTILE, min_size=2, max_size=6), HOSTILE, HOSTILE)
@settings(max_examples=150)
def test_no_text_ends_its_place_in_the_page(texts: list[str], id: str, reason: str) -> None:
    chunk = TracedChunk(0, 1, id, "key", 3, None, reason, 0.5)
    context = {"document": id, "seen": [id, texts[0]]}
    ids = tuple(range(len(texts)))
    trace = Trace(ids, ids[:1], (chunk,), (), (), 0.0, 1.0, 2.0, (), None, (2.0,))
    report = BlendReport(1, 0, 0, 1, len(ids), 1, 0, 0, 0, 1, 0, "none", fallback_reason=reason, trace=trace)
    page = page_of(_Written(texts), [(report.to_dict(), trace, [context])])
    nothing = Trace((), (), (), (), (), 0.0, 1.0, 2.0, (), None, ())
    plain = page_of(_Written([]), [(BlendReport(1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, "none").to_dict(), nothing, [])])
    assert page.isascii()
    for mark in ("<", "</script", "<script", "<!--", "<!"):
        assert page.count(mark) == plain.count(mark)
    found = data_of(page)
    assert "".join(found["tokens"]) == "".join(texts)
    [view] = found["views"]
    assert view["chunks"][0]["id"] == view["chunks"][0]["document"] == id
    assert view["chunks"][0]["reason"] == view["figures"]["fallback_reason"] == reason
    frame = page._repr_html_()
    assert frame.count("<") == 2 and frame.count(">") == 2
    assert 'sandbox="allow-scripts"' in frame


@pytest.fixture
def store(run: Command, documents: Path, model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    run("warm", documents, "--store", folder, "--model", model_folder, "--chunk-tokens", "40")
    return folder


def test_a_page_is_written_in_place(run: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--store", store, "--top-k", "3", "--max-new-tokens", "5"]
    said = run("inspect", "Where was Mara born?", *options, "--full", "--attention").stdout
    assert "inspect.html" in said
    data = data_of((tmp_path / "inspect.html").read_text(encoding="utf-8"))
    view, full = data["views"]
    assert (view["full"], full["full"]) == (False, True)
    assert len(view["chunks"]) == view["figures"]["hits"] == 3
    assert any(chunk["seen"] for chunk in view["chunks"])
    assert all(chunk["document"] is not None for chunk in view["chunks"])
    assert all(chunk["attention"] is not None for each in data["views"] for chunk in each["chunks"])
    assert "Where was Mara born?" in "".join(data["tokens"])


def test_a_page_that_cannot_be_written_is_said_at_once(run: Command, store: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "page.html"
    assert "does not exist" in run("inspect", "Where?", "--store", store, "--html", missing, code=2).stderr
    assert run("inspect", "  ", "--store", store, code=2).stderr
