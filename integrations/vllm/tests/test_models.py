"""Models of several kinds under vLLM: layers whose blocks differ, quantised weights, releases never seen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own (make check-vllm)")

from vllm_cacheblend import kv_transfer_config, prove
from vllm_cacheblend.cards import card_of, precision_of
from vllm_cacheblend.prefix import StoredPrefix, stored_prefix

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store
from integrations.serve.tests.process import LEAST, VLLM, ServerProcess
from integrations.vllm.tests.conftest import FORM, Corpus, corpus_of, engine_answer, segments
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
TEXTS = ["Mara Tolvin is a wood carver.", "She lives in Oakford.", "She keeps a grey goat.", "It eats her hats."]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What a folder says of its weights, and the dtype that its kernels run in.
_QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors": (
        {
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
        },
        "float32",
    ),
    "awq": ({"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "bfloat16"),
}


def made(folder: Path, family: str, chat_template: str | None = None, **changes: Any) -> Path:
    """Return a folder with a random model of a family that vLLM can run, and the reference model's tokenizer."""
    tokenizer = load_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
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


def quantised(folder: Path, method: str) -> Path:
    """Return a model's folder once its weights are of 8 bits, one scale for each row, or drawn of 4 bits."""
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in weights if name.endswith(".weight") and name.split(".")[-2] in _LINEARS]:
        stem, weight = name.removesuffix(".weight"), weights.pop(name)
        rows, columns = weight.shape
        if method == "awq":
            weights[f"{stem}.qweight"] = torch.randint(-(2**31), 2**31, (columns, rows // 8)).to(torch.int32)
            weights[f"{stem}.qzeros"] = torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32)
            weights[f"{stem}.scales"] = torch.full((columns // 32, rows), 0.05)
        else:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name], weights[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": method} | _QUANTISED[method][0]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


@pytest.fixture(scope="module", params=[("gemma3_text", _TWO_KINDS), ("gpt_oss", {})], ids=lambda each: each[0])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Corpus, Any]]:
    """A corpus encoded by a model of full and sliding layers, and vLLM over it; prompts are computed in steps."""
    family, changes = request.param
    folder, store, spool = (tmp_path_factory.mktemp(name) for name in ("model", "kv", "spool"))
    made(folder, family, **changes)
    config = EngineConfig(separator=FORM.separator, dtype="float32")
    with BlendEngine.from_pretrained(folder, store=store, config=config) as engine:
        corpus = corpus_of(engine, store, spool, 12)
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


def test_full_and_sliding_layers_go_on_before_what_is_missing(several: tuple[Corpus, Any]) -> None:
    corpus, llm = several
    prefix = corpus.prefix(corpus.asked[1])
    known = StoredPrefix(prefix.token_ids, prefix.pieces[:3], prefix.namespace, "")
    [expected] = asker(llm)([known])
    key = prefix.pieces[3].key
    [path] = [path for path in corpus.store.rglob("*.safetensors") if key in path.name]
    path.unlink()
    # Found in the index as it is promised, it is missed as it is loaded.
    [output] = asker(llm)([prefix])
    assert ids_of(output) == ids_of(expected)
    assert output.num_cached_tokens == known.num_stored
    id = next(id for id in corpus.engine.ids() if key in corpus.engine.records([id])[0].keys)
    with corpus.without_document_of(id):
        [output] = asker(llm)([prefix], salt="deleted")
        assert output.num_cached_tokens < prefix.num_stored


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


@pytest.mark.parametrize(
    ("method", "kv_cache_dtype"),
    [
        ("compressed-tensors", "auto"),
        pytest.param("compressed-tensors", "fp8", marks=pytest.mark.full),
        pytest.param("awq", "auto", marks=pytest.mark.full),
    ],
)
def test_a_quantised_model_answers_as_after_its_own_full_prefill(
    method: str, kv_cache_dtype: str, tmp_path: Path, in_process: None
) -> None:
    if kv_cache_dtype == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 on processors with AVX-512")
    folder, kv, spool = quantised(made(tmp_path / "model", "qwen3"), method), tmp_path / "kv", tmp_path / "spool"
    spool.mkdir()
    dtype: Any = _QUANTISED[method][1]
    # Exact where a prompt begins as its chunks were encoded, and has both chunks of one document in order.
    config = EngineConfig(separator=FORM.separator, dtype=dtype, preamble=FORM.prefix())
    store = open_store(kv, 1 << 26)
    precision = precision_of(folder, ["--kv-cache-dtype", kv_cache_dtype])
    assert precision == (method, kv_cache_dtype)
    assert precision_of(folder, ["-q", "fp8"]) == ("fp8", "auto")
    card = card_of(folder, config, kv, precision)
    assert card.identity != card_of(folder, config, kv, precision._replace(kv_cache_dtype="fp8_e5m2")).identity
    transfer = kv_transfer_config(card, kv, ram_bytes=0, spool=spool, precision=precision)
    llm = vllm_of(folder, transfer, 32, kv_cache_dtype=kv_cache_dtype, dtype=dtype)
    try:
        prove(llm)
        with library_of(llm, store, spool, card, load_tokenizer(), config) as library:
            chunks = [Chunk(text, f"{n}", document="d", start=100 * n) for n, text in enumerate(TEXTS[:2])]
            assert library.add(chunks).encoded == len(chunks)
            prefixes = [
                stored_prefix(library, BlendPrompt(segments=segments(FORM, [f"{n}" for n in range(count)], "Who?")))
                # Behind the first, keys are moved and rounded anew, which few bits show.
                for count in range(1, (len(chunks) if (dtype, kv_cache_dtype) == ("float32", "auto") else 1) + 1)
            ]
            outputs = asker(llm)(prefixes)
            assert [output.num_cached_tokens for output in outputs] == [prefix.num_stored for prefix in prefixes]
            plain = asker(llm)(prefixes, stored=False, salt="plain {}")
            assert [ids_of(each) for each in outputs] == [ids_of(each) for each in plain]
    finally:
        llm.llm_engine.engine_core.shutdown()
        store.close()


def test_a_thinking_model_is_told_whether_to_think(tmp_path: Path) -> None:
    folder, store = made(tmp_path / "model", "qwen3", chat_template=THINKING), tmp_path / "kv"
    options = ("--model", str(folder), "--store", str(store), *LEAST)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "documents": ["d"], "max_tokens": 12}
    with (
        ServerProcess(tmp_path / "log", *VLLM, *options) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        BlendEngine.from_pretrained(
            folder, store=store, config=EngineConfig(separator="\n\n", dtype="float32", prefix_bytes=0)
        ) as engine,
    ):
        assert http.put("/v1/documents/d", json={"chunks": TEXTS}).json()["encoded"] == len(TEXTS)
        prompts = []
        for is_thinking in (True, False):
            body = asked | {"chat_template_kwargs": {"enable_thinking": is_thinking}}
            reply = http.post("/v1/chat/completions", json=body).json()
            answer = engine_answer(engine, body)
            # Of half a character at the end, one of the two says that there is something.
            assert reply["choices"][0]["message"]["content"].rstrip("\ufffd") == answer.text.rstrip("\ufffd")
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == answer.cached_tokens > 0
            prompts.append(reply["usage"]["prompt_tokens"])
        # The empty thoughts that it is not to think.
        assert prompts[0] < prompts[1]


@pytest.mark.parametrize("connector", ["Unseen", "OtherAttention", "OtherBlocks"])
def test_a_vllm_of_an_unseen_number_is_tried(corpus: Corpus, connector: str, in_process: None) -> None:
    named = {"kv_connector": connector, "kv_connector_module_path": "integrations.vllm.tests.unseen"}
    if connector == "OtherBlocks":
        with pytest.raises(ConfigError, match=r"numbers written into blocks as keys, .* were read back differently"):
            started(corpus, 32, connector=named)
        return
    llm = started(corpus, 32, connector=named)
    try:
        prefix = corpus.prefix(corpus.asked[0])
        [output] = asker(llm)([prefix])
        assert (output.num_cached_tokens, ids_of(output)) == (0, full(corpus, prefix))
        if connector == "OtherAttention":
            with pytest.raises(ConfigError, match="log probabilities differ by"):
                prove(llm)
        else:
            prove(llm)
        [output] = asker(llm)([prefix], salt="after")
        is_proved = connector == "Unseen"
        assert output.num_cached_tokens == (prefix.num_stored if is_proved else 0)
        assert ids_of(output) == (corpus.expected(corpus.asked[0])[0] if is_proved else full(corpus, prefix))
    finally:
        llm.llm_engine.engine_core.shutdown()
