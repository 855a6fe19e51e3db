"""The engine over packed KV: every codec answers, and the settings are the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.codec import codec_names
from cacheblend_rag.errors import ConfigError
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((40, 33, 20, 17))]
PROMPT = BlendPrompt(words(4, 50), CHUNKS, words(6, 51))


def engine_with(store: Path | None = None, **settings: object) -> BlendEngine:
    config = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15, **settings)
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **config, store=store)


def test_logits_move_no_more_than_the_bits_allow(tmp_path: Path) -> None:
    logits = {}
    for codec in codec_names():
        with engine_with(tmp_path / codec, ram_codec=codec, disk_codec=codec) as engine:
            engine.add(CHUNKS)
            result = engine.prefill(PROMPT)
            assert result.report.hits == 4
            logits[codec] = result.logits
        with engine_with(tmp_path / codec, ram_bytes=0) as engine:
            # From disk, under settings that name another codec: the same KV.
            result = engine.prefill(PROMPT)
            assert result.report.hits == 4
            assert torch.equal(result.logits, logits[codec])
    scale = logits["native"].norm()
    errors = {codec: float((logits[codec] - logits["native"]).norm() / scale) for codec in codec_names()}
    assert errors["float32"] == 0
    assert 0 < errors["float16"] < 2e-3
    assert errors["float16"] < errors["int8"] < 0.05
    assert errors["int8"] < errors["int4"] < errors["int2"] < 1


@pytest.mark.parametrize("ram_codec", ["native", "int4"])
def test_by_default_kv_on_disk_takes_8_bits_and_answers_outlive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram_codec: str
) -> None:
    sizes = {}
    with engine_with(tmp_path / "native", ram_codec=ram_codec, disk_codec="native") as engine:
        engine.add(CHUNKS)
        sizes["native"] = engine.store.stats().disk_bytes
    monkeypatch.delenv("CACHEBLEND_DISK_CODEC")
    with engine_with(tmp_path / "kv", ram_codec=ram_codec) as engine:
        assert engine.config.disk_codec == "int8"
        engine.add(CHUNKS[:3])
        engine.prefill(PROMPT)
        engine.flush()
        before = engine.prefill(PROMPT)
        sizes["default"] = engine.store.stats().disk_bytes
    with engine_with(tmp_path / "kv", ram_codec=ram_codec) as engine:
        after = engine.prefill(PROMPT)
    assert before.report.hits == after.report.hits == 4
    assert torch.equal(before.logits, after.logits)
    assert sizes["default"] < 0.5 * sizes["native"]


def test_a_prompt_of_chunks_that_were_packed_by_different_codecs(tmp_path: Path) -> None:
    for number, codec in enumerate(("native", "float16", "int8", "int4")):
        with engine_with(tmp_path, disk_codec=codec) as engine:
            engine.add(CHUNKS[number : number + 1])
    with engine_with(tmp_path, ram_codec="int8", disk_codec="int2") as engine:
        for _ in range(2):
            result = engine.prefill(PROMPT)
            assert (result.report.hits, result.report.misses) == (4, 0)
            assert bool(result.logits.isfinite().all())
        assert engine.add(CHUNKS).encoded == 0


def test_the_whole_prompt_recomputed_is_exact_whatever_the_codec() -> None:
    with engine_with(ram_codec="int2") as engine:
        engine.add(CHUNKS)
        full = engine.prefill(PROMPT, blend=engine.blend.replace(enabled=False)).logits
        whole = engine.prefill(PROMPT, blend=engine.blend.replace(recompute_ratio=1.0)).logits
        assert (whole - full).abs().max() < 1e-4


def test_codecs_are_settings_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="ram_codec is fixed when an engine is made"):
        BlendConfig(ram_codec="int4")
    with pytest.raises(ConfigError, match="disk_codec='gzip': Input should be 'native'"):
        engine_with(disk_codec="gzip")


def test_a_channel_of_large_keys_costs_the_others_nothing() -> None:
    """As Qwen2.5 has them, which codecs with one grid a token lose."""
    errors = []
    for factor in (1, 50):
        model = tiny_model("llama")
        with torch.no_grad():
            for layer in model.get_decoder().layers:
                # A channel of the first head of keys, and of the queries that read it, so that attention stays as it was but for
                # what the rotation mixes.
                layer.self_attn.k_proj.weight[3] *= factor
                layer.self_attn.q_proj.weight[3] /= factor
        logits = {}
        for codec in ("native", "int8", "int4"):
            settings = engine_settings(strict=True, recompute_ratio=0.0, ram_codec=codec)
            with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
                engine.add(CHUNKS)
                logits[codec] = engine.prefill(PROMPT).logits
        scale = logits["native"].norm()
        errors.append({codec: float((logits[codec] - logits["native"]).norm() / scale) for codec in ("int8", "int4")})
    plain, outlying = errors
    assert outlying["int8"] < max(0.02, 2 * plain["int8"])
    assert outlying["int4"] < max(0.2, 2 * plain["int4"])
