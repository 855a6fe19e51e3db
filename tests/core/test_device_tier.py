"""An engine with KV resident on its device answers as one without, and forgets what is deleted."""

from itertools import product
from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store
from cacheblend_rag.store.memory import spare_bytes
from tests.engines import MakeEngine
from tests.families import tiny_model, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20, 17))]
PROMPTS = [BlendPrompt("t5", chunks, "t8") for chunks in (CHUNKS, CHUNKS[::-1], [CHUNKS[1], CHUNKS[1], CHUNKS[0]])]
ENGINE = {"strict": True}


@pytest.fixture
def make(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    return lambda folder="kv", **settings: make_engine(None if folder is None else tmp_path / folder, **settings)


def tiers(engine: BlendEngine, prompt: BlendPrompt = PROMPTS[0]) -> list[str | None]:
    return [chunk.tier for chunk in engine.prefill(prompt).report.chunks]


@pytest.mark.parametrize("folder", ["kv", None])
@pytest.mark.parametrize("selector", ["none", "hkvd", "random"])
@pytest.mark.parametrize("staged", [False, True])
def test_answers_are_those_without_it(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, folder: str | None, selector: str, staged: bool
) -> None:
    # With `staged`, layers go the way that they go to other devices than the CPU.
    monkeypatch.setattr("cacheblend_rag.loader.assembly._is_staged", lambda device: staged)
    monkeypatch.setattr("cacheblend_rag.loader.assembly._PIECE_BYTES", 1)
    monkeypatch.setattr("cacheblend_rag.loader.layers._THREAD_PAYS_BYTES", 0)
    ways = [{"load_threads": 1}, {"load_threads": 3, "prefetch_layers": 3}]
    with make(folder, selector=selector) as plain:
        plain.add(CHUNKS)
        wanted = [plain.prefill(prompt).logits for prompt in PROMPTS]
        text = plain.generate(PROMPTS[0], 8).text
    for some_room, way in product((10**8, 60_000), ways):
        with make(folder, selector=selector, device_bytes=some_room, **way) as engine:
            engine.add(CHUNKS)
            # Once to bring there what each prompt has in its places.
            for prompt, logits in [*zip(PROMPTS, wanted, strict=True)] * 2:
                result = engine.prefill(prompt)
                assert torch.equal(result.logits, logits)
                assert engine._store.stats().device_bytes <= some_room
                used = {chunk.tier for chunk in result.report.chunks}
                assert used <= {"device", "ram", "disk"}
            assert engine.generate(PROMPTS[0], 8).text == text
            if some_room > 10**6:
                assert used == {"device"}
                assert result.report.load_bytes == 0
            else:
                assert engine._store.stats().device_bytes > 0
                assert engine._store.stats().device_evictions > 0


def test_deletions_and_updates_reach_it(make: MakeEngine) -> None:
    with make(device_bytes=10**8) as engine:
        engine.add(CHUNKS)
        assert tiers(engine) == ["ram"] * 4
        assert tiers(engine) == ["device"] * 4
        held = engine._store.stats().device_bytes
        engine.delete(["n0"])
        engine.add([Chunk(words(9, 77), "n1")])
        gone = sum(len(engine.tokenizer(CHUNKS[n].text)["input_ids"]) for n in (0, 1)) / 79
        assert engine._store.stats().device_bytes == pytest.approx(held * (1 - gone), rel=0.01)
        fresh = engine.prefill(BlendPrompt("t5", CHUNKS[:2], "t6")).report
        assert (fresh.hits, fresh.misses) == (0, 2)
        engine._store.clear()
        assert engine._store.stats().device_bytes == 0


def test_tenants_do_not_share_it(make: MakeEngine, tmp_path: Path) -> None:
    shared = open_store(tmp_path / "shared", 10**8, device_bytes=10**8)
    plain = make()
    acme, other = (
        BlendEngine(plain.model, plain.tokenizer, **engine_settings(tenant=name, strict=True), store=shared)
        for name in ("acme", "other")
    )
    acme.add(CHUNKS)
    tiers(acme)
    assert tiers(acme) == ["device"] * 4
    assert tiers(other, BlendPrompt("t5", [Chunk(each.text) for each in CHUNKS], "t6")) == [None] * 4
    assert shared.stats("other").device_bytes == 0 < shared.stats("acme").device_bytes
    shared.clear("acme")
    assert shared.stats().device_bytes == 0
    for engine in (acme, other, plain):
        engine.close()
    shared.close()


def test_a_store_for_other_devices_serves_from_the_cpu(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device_bytes=10**8) as engine:
        engine.add(CHUNKS)
        wanted = engine.prefill(PROMPTS[0]).logits
        # What lies elsewhere than where the model computes is read like from RAM.
        elsewhere = property(lambda reader: (torch.device("meta"),) * 6, lambda reader, devices: None)
        monkeypatch.setattr("cacheblend_rag.store.memory.DeviceReader.devices", elsewhere)
        result = engine.prefill(PROMPTS[0])
        assert torch.equal(result.logits, wanted)
        assert result.report.load_bytes > 0


def test_how_much_by_default(make: MakeEngine) -> None:
    with make() as engine:
        assert engine._store._tiers.device.limit_bytes == 0  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="device_bytes is fixed when an engine is made"):
            BlendConfig(device_bytes=5)
        assert not engine._store._tiers.ram._page_locked  # type: ignore[attr-defined]
    with make(page_locked=True) as engine:
        assert engine._store._tiers.ram._page_locked  # type: ignore[attr-defined]
    assert spare_bytes([torch.device("cpu")]) == 0
    with pytest.raises(ConfigError, match="device_bytes"):
        EngineConfig(device_bytes=-1)


@pytest.mark.cuda
@pytest.mark.parametrize("threads", [1, 3])
def test_on_a_cuda_device(make_engine: MakeEngine, threads: int) -> None:
    model = tiny_model("llama").to("cuda")  # type: ignore[arg-type]
    engine = make_engine(model=model, strict=True, load_threads=threads)
    assert engine._store._tiers.device.limit_bytes > 0  # type: ignore[attr-defined]
    assert engine._store._tiers.ram._page_locked  # type: ignore[attr-defined]
    engine.add(CHUNKS)
    first, second = engine.prefill(PROMPTS[0]), engine.prefill(PROMPTS[0])
    assert [chunk.tier for chunk in second.report.chunks] == ["device"] * 4
    assert second.report.load_bytes == 0
    torch.testing.assert_close(first.logits, second.logits)
    assert all(
        each.layer.keys.is_cuda
        for kv in engine._store._tiers.device._entries.values()
        for each in kv.layers  # type: ignore[attr-defined]
    )
