"""States that are stored, served, deleted and refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend_hybrid import HybridEngine
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef, EngineConfig, FixedText
from cacheblend_rag.engine import ChunkCollection
from cacheblend_rag.errors import UnsupportedModelError
from integrations.hybrid.tests.conftest import HEAD, PIECES, MakeHybrid, ask, hybrid, own_answer, own_logits
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import damage

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "granitemoehybrid"),
    *("bamba", "zamba2", "nemotron_h", "olmo_hybrid", "inkling_text"),
)


# How far apart, over the largest logit, their own last step and their own reading of the whole are.
NOISE = {"zamba2": 1e-3, "nemotron_h": 1e-3}


def distance(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far logits are off, relative to the largest."""
    return float((logits - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_behind_a_head_is_exact(make_hybrid: MakeHybrid, tmp_path: Path, family: str) -> None:
    model = hybrid(family)
    # The second engine finds the state on disk.
    for hits, question in ((0, words(9, 4)), (3, words(5, 5))):
        engine, prompt = make_hybrid(model, store=tmp_path), ask("a", "b", "c", question=question)
        found, wanted = engine.prefill(prompt), own_logits(engine, prompt)
        assert found.report.hits == hits
        assert distance(found.logits, wanted) < NOISE.get(family, 1e-4)
        answer = engine.generate(prompt, 6, do_sample=False)
        assert (answer.report.hits, answer.report.recomputed_tokens, answer.report.fallback_reason) == (3, 0, None)
        assert list(answer.token_ids) == own_answer(engine, prompt, 6)
        engine.flush()


OTHERS: dict[str, tuple[BlendPrompt, str]] = {
    "not from the first chunk": (ask("b", "a"), "'b', is not the first of its document, 'd'"),
    "no chunk": (BlendPrompt(words(9, 1)), "no chunks"),
    "places": (BlendPrompt(segments=[HEAD, ChunkRef("a"), words(5, 4)], positions=[0, 13, 43]), "places"),
    "another text under an id": (BlendPrompt(segments=[HEAD, Chunk(words(30, 8), "a"), words(5, 4)]), "not added"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_is_read_in_full_and_told_what_it_lacks(make_hybrid: MakeHybrid, name: str) -> None:
    prompt, lacks = OTHERS[name]
    engine = make_hybrid()
    for _ in range(2):
        found = engine.prefill(prompt)
        assert distance(found.logits, own_logits(engine, prompt)) < 1e-4
        assert (found.report.selector, found.report.hits) == ("full", 0)
        said = str(found.report.fallback_reason)
        assert said.startswith(str(engine.unsupported_reason)) and lacks in said
    assert engine.heads() == []


def test_the_state_behind_what_may_be_a_users_own_stays_in_memory(make_hybrid: MakeHybrid, tmp_path: Path) -> None:
    engine = make_hybrid(store=tmp_path)
    for is_held in (False, True):
        report = engine.prefill(ask("a", "b", head=words(12, 3))).report
        assert (report.misses == 0) is is_held
    assert gone(engine, tmp_path) and engine.store.stats().ram_bytes
    engine.delete(["a"])
    assert not engine.store.stats().ram_bytes


def test_first_chunks_serve_the_rest(make_hybrid: MakeHybrid) -> None:
    engine = make_hybrid()
    engine.add([Chunk(words(20, 9), "other")])
    for ids, hits, computed in ((["a"], 0, 30), (["a", "b", "c"], 1, 60), (["a", "b", "c", "other"], 3, 20)):
        found = engine.prefill(ask(*ids))
        assert (found.report.hits, found.report.recomputed_tokens) == (hits, computed)
        assert distance(found.logits, own_logits(engine, ask(*ids))) < 1e-4
    # Of each prefix there is one state, and the tokens of another head, tenant or question are not its.
    assert len(engine.heads()) == 2
    assert engine.prefill(ask("a", head=FixedText(words(12, 7)))).report.hits == 0
    assert all(chunk.reason for chunk in engine.prefill(ask("b")).report.chunks)
    with engine.for_tenant("another") as other:
        assert isinstance(other, HybridEngine)
        other.add(PIECES)
        assert other.prefill(ask("a")).report.hits == 0
    whole = engine.prefill(ask("a"), logits_to_keep=4)
    assert whole.logits.shape[0] == 4 and whole.report.hits == 0
    off = engine.prefill(ask("a"), blend=BlendConfig(enabled=False)).report
    assert (off.selector, off.fallback_reason, off.recomputed_tokens) == ("full", "blending is off", 30)


def test_streams_batches_and_callers_at_once(make_hybrid: MakeHybrid) -> None:
    engine = make_hybrid()
    prompts = [ask("a", "b", question=words(6, number)) for number in range(10, 16)]
    wanted = [own_answer(engine, prompt, 5) for prompt in prompts]
    assert [list(each.token_ids) for each in engine.generate_many(prompts, 5, do_sample=False)] == wanted

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: engine.stream(prompt, 5, do_sample=False).result(), prompts))
    assert [list(each.token_ids) for each in found] == wanted


def gone(engine: HybridEngine, folder: Path) -> bool:
    engine.flush()
    return not engine.heads() and not list(folder.rglob("*.safetensors"))


CHANGES: dict[str, Any] = {
    "a chunk of it": lambda engine: engine.delete(["a"]),
    "a later chunk": lambda engine: engine.delete(["c"]),
    "the document": lambda engine: engine.delete_document("d"),
    "another text": lambda engine: engine.add([Chunk(words(31, 7), "b", document="d", start=400)]),
    "a shorter document": lambda engine: engine.add(PIECES[:2], whole=True),
    "a vector store without it": lambda engine: ChunkCollection(engine, lambda ids: ()).sync(["b"]),
    "the state itself": lambda engine: engine.delete(engine.heads()),
    "everything": lambda engine: engine.store.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_goes_with_a_chunk_that_it_knows(make_hybrid: MakeHybrid, tmp_path: Path, change: str) -> None:
    engine = make_hybrid(store=tmp_path)
    engine.add([Chunk(words(20, 9), "other")])
    engine.prefill(ask("a", "b", "c"))
    # What changes nothing, or something else, leaves it.
    engine.add(PIECES)
    engine.delete(["other"])
    assert not gone(engine, tmp_path)
    CHANGES[change](engine)
    assert gone(engine, tmp_path)


def test_a_chunk_that_is_deleted_while_it_is_read(
    make_hybrid: MakeHybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_hybrid(store=tmp_path)
    states = engine.backend.states  # type: ignore[attr-defined]
    take = states.take

    def deleting(cache: Any) -> Any:
        engine.delete(["b"])
        return take(cache)

    monkeypatch.setattr(states, "take", deleting)
    engine.prefill(ask("a", "b"))
    assert gone(engine, tmp_path)


def test_a_damaged_state_is_read_again(make_hybrid: MakeHybrid, tmp_path: Path) -> None:
    for hits in (0, 0, 2):
        engine = make_hybrid(store=tmp_path, config=EngineConfig(ram_bytes=0))
        found = engine.prefill(ask("a", "b"))
        assert found.report.hits == hits
        assert distance(found.logits, own_logits(engine, ask("a", "b"))) < 1e-4
        engine.close()
        if not found.report.chunks[0].reason or "could not be read" not in found.report.chunks[0].reason:
            [damage(file) for file in tmp_path.rglob("*.safetensors")]


# Those that read one token at a time after a state, those without a layer that attends, and one with its states elsewhere.
@pytest.mark.parametrize("family", ["jamba", "zamba", "mamba", "mamba2", "recurrent_gemma"])
def test_a_model_that_does_not_go_on_after_its_states_is_read_in_full(make_hybrid: MakeHybrid, family: str) -> None:
    engine = make_hybrid(family)
    found = engine.generate(ask("a"), 4, do_sample=False)
    assert found.report.fallback_reason == engine.unsupported_reason
    assert list(found.token_ids) == own_answer(engine, ask("a"), 4)


def test_the_engine_of_any_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cacheblend_rag.engine.engine.load_pretrained", lambda name, *_: (models[str(name)], tiny_tokenizer())
    )
    models = {"lfm2": hybrid("lfm2"), "llama": tiny_model("llama")}
    for installed, kind in (([HybridEngine], HybridEngine), ([], BlendEngine)):
        points = [SimpleNamespace(load=lambda kind=each: kind) for each in installed]
        monkeypatch.setattr("cacheblend_rag.engine.backend.entry_points", lambda group, points=points: points)
        for name in models:
            with BlendEngine.from_pretrained(name) as engine:
                assert type(engine) is (kind if name == "lfm2" else BlendEngine)
    with BlendEngine(models["lfm2"], tiny_tokenizer()) as engine:
        assert 'the extra "hybrid"' in str(engine.unsupported_reason)
    with pytest.raises(UnsupportedModelError):
        HybridEngine(hybrid("lfm2"), tiny_tokenizer(), config=EngineConfig(strict=True))
