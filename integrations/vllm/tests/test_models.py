"""Models of several kinds under vLLM: layers whose blocks differ, quantised weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own (make check-vllm)")

from vllm_cacheblend import kv_transfer_config
from vllm_cacheblend.cards import card_of, precision_of
from vllm_cacheblend.prefix import stored_prefix

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.store import open_store
from integrations.vllm.tests.conftest import FORM, Corpus, corpus_of, segments
from integrations.vllm.tests.test_live import (
    asker,
    check_encoding,
    full,
    ids_of,
    library_of,
    num_put_off,
    started,
    vllm_of,
)

pytestmark = pytest.mark.timeout(900)

_TWO_KINDS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
TEXTS = ["Mara Tolvin is a wood carver.", "She lives in Oakford."]
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What a folder says of its weights.
_QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            # Symmetric ones run in bfloat16 alone.
            "input_activations": {"num_bits": 8, "symmetric": False, "strategy": "token", "dynamic": True},
        }
    },
}


def made(folder: Path, family: str, **changes: Any) -> Path:
    """Return a folder with a random model of a family that vLLM can run, and the reference model's tokenizer."""
    tokenizer = load_tokenizer()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 40,
    }
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = tiny_config(family, vocab_size=len(tokenizer), **sizes, **tokens, **changes)
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantised(folder: Path) -> Path:
    """Return a model's folder once its weights are of 8 bits, one scale for each row."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".weight") and name.split(".")[-2] in _LINEARS]:
        weight = weights.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        weights[name], weights[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTISED}))
    return folder


@pytest.fixture(
    scope="module",
    params=[("gemma3_text", _TWO_KINDS), pytest.param(("gpt_oss", {}), marks=pytest.mark.full)],
    ids=["gemma3", "gpt_oss"],
)
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Corpus, Any]]:
    """A corpus encoded by a model of full and sliding layers, and vLLM over it; prompts are computed in steps."""
    family, changes = request.param
    folder, store = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("kv")
    made(folder, family, **changes)
    config = EngineConfig(separator=FORM.separator, dtype="float32")
    with BlendEngine.from_pretrained(folder, store=store, config=config) as engine:
        corpus = corpus_of(engine, store, 12)
        llm = started(corpus, 32, folder, max_num_batched_tokens=96, max_model_len=1024)
        yield corpus, llm
        llm.llm_engine.engine_core.shutdown()


def test_full_and_sliding_layers_answer_as_in_transformers(several: tuple[Corpus, Any]) -> None:
    corpus, llm = several
    prefixes = [corpus.prefix(each) for each in corpus.asked]
    outputs = asker(llm)(prefixes, salt="number {}")
    for asked, prefix, output in zip(corpus.asked, prefixes, outputs, strict=True):
        assert ids_of(output) == corpus.expected(asked)[0]
        assert output.num_cached_tokens == prefix.num_stored
    [output] = asker(llm)(prefixes[:1], stored=False, salt="plain")
    assert ids_of(output) == full(corpus, prefixes[0])


def test_full_and_sliding_layers_are_computed_where_kv_is_missing(several: tuple[Corpus, Any]) -> None:
    corpus, llm = several
    prefix = corpus.prefix(corpus.asked[1])
    key = prefix.pieces[3].key
    [path] = [path for path in corpus.store.rglob("*.safetensors") if key in path.name]
    path.unlink()
    # Found in the index as it is promised, it is missed as it is loaded.
    [output] = asker(llm)([prefix])
    assert ids_of(output) == full(corpus, prefix)
    id = next(id for id in corpus.engine.ids() if key in corpus.engine.records([id])[0].keys)
    with corpus.without_document_of(id):
        [output] = asker(llm)([prefix], salt="deleted")
        assert 0 < output.num_cached_tokens < prefix.num_stored


def test_full_and_sliding_layers_are_put_off(several: tuple[Corpus, Any]) -> None:
    corpus, llm = several
    before = num_put_off(llm)
    prefixes = [corpus.prefix(each) for each in corpus.asked]
    outputs = asker(llm)(prefixes, salt="put off", ignore_eos=True, max_tokens=96)
    assert num_put_off(llm) > before
    for asked, output in zip(corpus.asked, outputs, strict=True):
        ids, _ = corpus.expected(asked)
        assert ids_of(output)[: len(ids)] == ids


def test_full_and_sliding_layers_are_encoded_by_vllm(several: tuple[Corpus, Any], tmp_path: Path) -> None:
    check_encoding(*several, tmp_path / "kv")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have vLLM run in this process, where it is up soon and raises its errors; the cores that it takes are given back."""
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.full)])
def test_a_quantised_model_answers_as_after_its_own_full_prefill(
    kv_cache_dtype: str, tmp_path: Path, in_process: None
) -> None:
    if kv_cache_dtype == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 on processors with AVX-512")
    folder, kv = quantised(made(tmp_path / "model", "qwen3")), tmp_path / "kv"
    # Exact where a prompt begins as its chunk was encoded.
    config = EngineConfig(separator=FORM.separator, dtype="float32", preamble=FORM.prefix())
    precision = precision_of(folder, None, kv_cache_dtype)
    assert precision == ("compressed-tensors", kv_cache_dtype)
    assert precision_of(folder, "fp8") == ("fp8", "auto")
    chunks = [Chunk(text, f"{n}", document="d", start=100 * n) for n, text in enumerate(TEXTS)]
    with closing(open_store(kv, 1 << 26)) as store:
        card = card_of(folder, config, kv, precision)
        assert card.identity != card_of(folder, config, kv, precision._replace(kv_cache_dtype="fp8_e5m2")).identity
        transfer = kv_transfer_config(card, kv, ram_bytes=0, precision=precision)
        llm = vllm_of(folder, transfer, 32, kv_cache_dtype=kv_cache_dtype)
        with library_of(llm, store, card, load_tokenizer(), config) as library:
            assert library.add(chunks).encoded == len(chunks)
            prefixes = [
                stored_prefix(library, BlendPrompt(segments=segments(FORM, [chunk.id], "Who?"))) for chunk in chunks
            ]
            outputs = asker(llm)(prefixes)
            assert [output.num_cached_tokens for output in outputs] == [prefix.num_stored for prefix in prefixes]
            plain = asker(llm)(prefixes, stored=False, salt="plain {}")
            assert [ids_of(each) for each in outputs] == [ids_of(each) for each in plain]
        llm.llm_engine.engine_core.shutdown()
