"""vLLM behind stored KV, against transformers behind the same KV."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own (make check-vllm)")

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm_cacheblend import kv_transfer_config, spool_params, tokens_prompt, transfer_params
from vllm_cacheblend.library import VLLMLibrary
from vllm_cacheblend.prefix import PrefixPiece, StoredPrefix

from cacheblend_lab.reference import WEIGHTS_DIR as WEIGHTS
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVStore, open_store
from integrations.vllm.tests.conftest import Corpus, is_right

pytestmark = pytest.mark.timeout(900)

# Few enough for requests to be put off while others are answered.
BLOCKS = {32: 64, 128: 24}
Ask = Callable[..., list[Any]]


def started(corpus: Corpus, block_size: int, model: Path = WEIGHTS, **options: Any) -> LLM:
    """Return vLLM over the corpus' store."""
    return vllm_of(model, kv_transfer_config(corpus.engine.card(), corpus.store, ram_bytes=0), block_size, **options)


def vllm_of(model: Path, transfer: dict[str, Any], block_size: int, **options: Any) -> LLM:
    """Return vLLM over a model, of few blocks."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1920,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": block_size,
        "num_gpu_blocks_override": BLOCKS[block_size],
        "max_num_seqs": 16,
        "max_logprobs": -1,
        "disable_log_stats": False,
        "kv_transfer_config": transfer,
    }
    return LLM(str(model), **given | options)


@pytest.fixture(scope="module", params=[32, pytest.param(128, marks=pytest.mark.full)])
def llm(request: pytest.FixtureRequest, corpus: Corpus) -> Iterator[LLM]:
    model = started(corpus, request.param)
    yield model
    model.llm_engine.engine_core.shutdown()


@pytest.fixture
def ask(llm: LLM) -> Ask:
    return asker(llm)


def asker(llm: LLM) -> Ask:
    """Return a function that answers prompts behind stored KV or without it, under a salt (with {}, each its own) or none."""
    number = count()

    def answer(
        prefixes: Sequence[StoredPrefix], *, stored: bool = True, salt: str | None = "own", **options: Any
    ) -> list[Any]:
        prompts, params = [], []
        for prefix in prefixes:
            prompt = tokens_prompt(prefix)
            if salt != "own":
                del prompt["cache_salt"]
                prompt |= {} if salt is None else {"cache_salt": salt.format(next(number))}
            prompts.append(prompt)
            extra = {"kv_transfer_params": transfer_params(prefix)} if stored else None
            params.append(SamplingParams(temperature=0, extra_args=extra, **{"max_tokens": 48, **options}))
        return list(llm.generate(prompts, params, use_tqdm=False))

    return answer


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def full(corpus: Corpus, prefix: StoredPrefix) -> list[int]:
    """Return what transformers answers after a full prefill."""
    prompt = BlendPrompt(segments=[prefix.token_ids])
    return list(corpus.engine.generate(prompt, max_new_tokens=48).token_ids)


def test_answers_are_those_of_transformers_behind_the_same_kv(corpus: Corpus, ask: Ask) -> None:
    prefixes = [corpus.prefix(each) for each in corpus.asked]
    outputs = []
    # Under salts of their own, and so few at a time that none is put off: what is cached is what was stored.
    for first in range(0, len(prefixes), 4):
        outputs += ask(prefixes[first : first + 4], logprobs=-1, salt="number {}")
    right = {"vllm": 0, "engine": 0}
    worst = 0.0
    for asked, prefix, output in zip(corpus.asked, prefixes, outputs, strict=True):
        ids, logits = corpus.expected(asked)
        assert ids_of(output) == ids
        given = output.outputs[0].logprobs[0]
        wanted = logits.double().log_softmax(-1)
        worst = max(worst, *(abs(each.logprob - float(wanted[token])) for token, each in given.items()))
        right["vllm"] += is_right(asked, output.outputs[0].text)
        right["engine"] += is_right(asked, corpus.engine.tokenizer.decode(ids, skip_special_tokens=True))
        # Not a block more, not a token less.
        assert output.num_cached_tokens == prefix.num_stored
        assert prefix.num_stored == len(prefix.token_ids) - len(corpus.text_behind(asked))
    print(f"\n{len(outputs)} questions: largest difference of a log probability {worst:.2e}, right {right}")
    assert worst < 1e-4
    assert right["vllm"] >= right["engine"] > 0.8 * len(outputs)


def test_a_prompt_without_stored_kv_is_what_it_is_without_the_connector(corpus: Corpus, ask: Ask) -> None:
    prefixes = [corpus.prefix(each) for each in corpus.asked[:8]]
    expected = [full(corpus, prefix) for prefix in prefixes]
    assert [ids_of(each) for each in ask(prefixes, stored=False, salt="plain")] == expected
    # Beside requests behind stored KV of the same tokens, under a salt of their own.
    blended = ask(prefixes)
    assert [ids_of(each) for each in ask(prefixes, stored=False, salt=None)] == expected
    assert [ids_of(each) for each in blended] == [corpus.expected(each)[0] for each in corpus.asked[:8]]
    assert [ids_of(each) for each in blended] != expected


def test_what_vllm_has_and_what_the_store_has_are_put_together(corpus: Corpus, llm: LLM, ask: Ask) -> None:
    asked = corpus.asked[16]
    prefix = corpus.prefix(asked)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    # The most blocks that are stored whole, and the beginning of another.
    blocks = (prefix.num_stored - 4) // block
    assert blocks
    cut = StoredPrefix(prefix.token_ids[: blocks * block + 3], prefix.pieces, prefix.namespace, "")
    [begun] = ask([cut], salt="both", max_tokens=1)
    assert begun.num_cached_tokens == len(cut.token_ids) - 1
    [output] = ask([prefix], salt="both")
    assert output.num_cached_tokens == prefix.num_stored
    assert ids_of(output) == corpus.expected(asked)[0]


@pytest.mark.parametrize("fault", ["of other tokens", "of another tenant", "unreadable"])
def test_what_cannot_be_served_is_computed(corpus: Corpus, ask: Ask, fault: str) -> None:
    prefix = corpus.prefix(corpus.asked[18])
    expected = full(corpus, prefix)
    one, other = prefix.pieces[1], prefix.pieces[2]
    pieces = {
        "of other tokens": (prefix.pieces[0], PrefixPiece(other.key, 0, one.tokens), *prefix.pieces[2:]),
        "of another tenant": prefix.pieces,
        "unreadable": (PrefixPiece("no key", 0, 1),),
    }[fault]
    namespace = "f" * 32 if fault == "of another tenant" else prefix.namespace
    [output] = ask([StoredPrefix(prefix.token_ids, pieces, namespace, "")], salt=fault)
    assert ids_of(output) == expected


def test_a_file_that_goes_after_it_was_found_is_computed(corpus: Corpus, ask: Ask) -> None:
    asked = corpus.asked[19]
    prefix = corpus.prefix(asked)
    expected = full(corpus, prefix)
    key = prefix.pieces[3].key
    [path] = [path for path in corpus.store.rglob("*.safetensors") if key in path.name]
    path.unlink()
    [output] = ask([prefix], salt="gone")
    assert ids_of(output) == expected
    # Whoever misses it drops its entry: it is stored anew for the tests that follow.
    id = next(id for id in corpus.engine.ids() if key in corpus.engine.records([id])[0].keys)
    with corpus.without_document_of(id):
        pass


def num_put_off(llm: LLM) -> int:
    """Return how often vLLM has put off a request that it had begun."""
    return sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:num_preemptions")


def test_put_off_requests_are_answered_alike(corpus: Corpus, llm: LLM, ask: Ask) -> None:
    before = num_put_off(llm)
    prefixes = [corpus.prefix(each) for each in corpus.asked[:24]]
    outputs = ask(prefixes, salt="put off", ignore_eos=True, max_tokens=96)
    assert num_put_off(llm) > before
    for asked, output in zip(corpus.asked, outputs, strict=False):
        ids, _ = corpus.expected(asked)
        assert ids_of(output)[: len(ids)] == ids


def test_a_deleted_chunk_is_served_no_more(corpus: Corpus, ask: Ask) -> None:
    asked = corpus.asked[20]
    prefix = corpus.prefix(asked)
    expected = full(corpus, prefix)
    id = next(segment.id for segment in asked.prompt.segments[1:] if hasattr(segment, "id"))
    ask([prefix])
    with corpus.without_document_of(id):
        # Whoever asks with what was known before gets the tokens computed.
        [output] = ask([prefix], salt="deleted")
        assert ids_of(output) == expected
        assert output.num_cached_tokens < prefix.num_stored


def library_of(llm: LLM, store: KVStore, card: ModelCard, tokenizer: Any, config: EngineConfig) -> VLLMLibrary:
    """Return a library of chunks that vLLM encodes."""

    def warm(prompts: Sequence[tuple[str, tuple[int, ...]]], salt: str, is_awaited: bool) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": spool_params(name)})
            for name, _ in prompts
        ]
        llm.generate(
            [{"prompt_token_ids": list(ids), "cache_salt": salt} for _, ids in prompts], params, use_tqdm=False
        )

    return VLLMLibrary(card, tokenizer, store, warm, config=config)


def check_encoding(corpus: Corpus, llm: LLM, folder: Path) -> None:
    """Have vLLM encode documents for a tenant, and compare what is stored with what transformers store elsewhere."""
    documents = list(dict.fromkeys(chunk.document for chunk in corpus.chunks))[:6]
    chunks = [chunk for chunk in corpus.chunks if chunk.document in documents]
    ids = [chunk.id for chunk in chunks if chunk.id is not None]
    engine, config = corpus.engine, corpus.engine.config.replace(tenant="vllm")
    with (
        closing(open_store(corpus.store, 1 << 28)) as store,
        closing(open_store(folder, 1 << 28)) as other,
        library_of(llm, store, engine.card(), engine.tokenizer, config) as library,
        BlendEngine(engine.model, engine.tokenizer, store=other, config=config) as here,
    ):
        assert library.add(chunks).encoded == here.add(chunks).encoded == len(chunks)
        records = library.records(ids)
        assert records == here.records(ids)
        worst = 0.0
        for key in {key for record in records if record is not None for key in record.keys}:
            ours, theirs = store.open(key), other.open(key)
            assert ours is not None
            assert theirs is not None
            for layer in range(ours.num_layers):
                for part, wanted in zip(ours.layer(layer), theirs.layer(layer), strict=True):
                    worst = max(worst, float((part - wanted).abs().max() / wanted.abs().max().clamp(min=1)))
        print(f"\n{len(chunks)} chunks encoded by vLLM: largest difference, of its layer's largest number, {worst:.2e}")
        assert worst < 1e-3
        assert not list((corpus.store / "tmp").iterdir())
        assert library.delete(ids) == len(ids)


def test_what_vllm_encodes_is_what_the_engine_encodes(corpus: Corpus, llm: LLM, tmp_path: Path) -> None:
    check_encoding(corpus, llm, tmp_path / "kv")


@pytest.mark.full
def test_two_ranks_take_their_heads(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Left to itself, vLLM gives each rank a NUMA node of its own, of which small machines have one.
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    model = started(corpus, 32, tensor_parallel_size=2)
    try:
        check_encoding(corpus, model, tmp_path / "kv")
        asked = corpus.asked[:8]
        outputs = asker(model)([corpus.prefix(each) for each in asked])
        assert [ids_of(each) for each in outputs] == [corpus.expected(each)[0] for each in asked]
    finally:
        model.llm_engine.engine_core.shutdown()
