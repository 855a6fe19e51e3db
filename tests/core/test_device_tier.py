"""An engine with KV resident on its device answers as one without, and forgets what is deleted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import KVStore, open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20, 17))]
PROMPTS = [BlendPrompt("t5", chunks, "t8") for chunks in (CHUNKS, CHUNKS[::-1], [CHUNKS[1], CHUNKS[1], CHUNKS[0]])]
ENGINE = {"strict": True}


def tiers(engine: BlendEngine, prompt: BlendPrompt = PROMPTS[0]) -> list[str | None]:
    return [chunk.tier for chunk in engine.prefill(prompt).report.chunks]


@pytest.mark.parametrize("selector", ["none", "hkvd", "random"])
@pytest.mark.parametrize("room", [10**8, 60_000], ids=["all", "some"])
@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_those_without_it(
    make_engine: MakeEngine, tmp_path: Path, selector: str, room: int, threads: int
) -> None:
    with make_engine(tmp_path, selector=selector) as plain:
        plain.add(CHUNKS)
        wanted = [plain.prefill(prompt).logits for prompt in PROMPTS]
        text = plain.generate(PROMPTS[0], 8).text
    engine = make_engine(tmp_path, selector=selector, device_bytes=room, load_threads=threads)
    # Once to bring there what each prompt has in its places.
    for prompt, logits in [*zip(PROMPTS, wanted, strict=True)] * 2:
        result = engine.prefill(prompt)
        assert torch.equal(result.logits, logits)
        assert 0 < engine.store.stats().device_bytes <= room
    assert engine.generate(PROMPTS[0], 8).text == text
    if room > 10**6:
        assert {chunk.tier for chunk in result.report.chunks} == {"device"}
        assert result.report.load_bytes == 0
    else:
        assert engine.store.stats().device_evictions > 0


def test_deletions_and_updates_reach_it(make_engine: MakeEngine) -> None:
    engine = make_engine(device_bytes=10**8)
    engine.add(CHUNKS)
    assert tiers(engine) == ["ram"] * 4
    assert tiers(engine) == ["device"] * 4
    held = engine.store.stats().device_bytes
    engine.delete(["n0"])
    engine.add([Chunk(words(9, 77), "n1")])
    # Of 79 tokens, those of two chunks are gone.
    assert engine.store.stats().device_bytes == pytest.approx(held * (1 - (20 + 22) / 79), rel=0.01)
    fresh = engine.prefill(BlendPrompt("t5", CHUNKS[:2], "t6")).report
    assert (fresh.hits, fresh.misses) == (0, 2)
    engine.store.clear()
    assert engine.store.stats().device_bytes == 0


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[KVStore]:
    store = open_store(tmp_path, 10**8, device_bytes=10**8)
    yield store
    store.close()


def test_tenants_do_not_share_it(make_engine: MakeEngine, shared: KVStore) -> None:
    model = tiny_model("llama")
    acme, other = (make_engine(shared, model, tenant=name) for name in ("acme", "other"))
    acme.add(CHUNKS)
    tiers(acme)
    assert tiers(acme) == ["device"] * 4
    assert tiers(other, BlendPrompt("t5", [Chunk(each.text) for each in CHUNKS], "t6")) == [None] * 4
    assert other.store.stats().device_bytes == 0 < acme.store.stats().device_bytes
    acme.store.clear()
    assert shared.stats().device_bytes == 0


@pytest.mark.cuda
@pytest.mark.parametrize("threads", [1, 3])
def test_on_a_cuda_device(make_engine: MakeEngine, threads: int) -> None:
    model = tiny_model("llama").to("cuda")  # type: ignore[arg-type]
    engine = make_engine(model=model, load_threads=threads)
    engine.add(CHUNKS)
    first, second = engine.prefill(PROMPTS[0]), engine.prefill(PROMPTS[0])
    assert [chunk.tier for chunk in second.report.chunks] == ["device"] * 4
    assert second.report.load_bytes == 0
    torch.testing.assert_close(first.logits, second.logits)
