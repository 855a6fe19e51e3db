"""The parts of the connector that need no vLLM: requests, slots, reading and writing KV, what vLLM is started with."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_cacheblend.asking import FULL, asked_pieces, asked_spool, spool_params, transfer_params
from vllm_cacheblend.fitting import check_blocks, check_fit, check_release
from vllm_cacheblend.library import VLLMLibrary
from vllm_cacheblend.loading import Group, Load, heads_of, load_prefix, slots_of
from vllm_cacheblend.prefix import PrefixPiece, StoredPrefix, stored_prefix
from vllm_cacheblend.spooling import BlockReader, read_spool, write_spool

from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.backend import Attachment, RunningForward
from cacheblend_rag.errors import BackendError, ChunkReadError, ConfigError, PromptError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVStore, open_store
from tests.engines import evict

MARA = ["Mara Tolvin is a wood carver.\n", "She lives in Oakford.\n", "She keeps a grey goat.\n"]
STARTS = (0, 30, 52)


def chunks(document: str) -> list[Chunk]:
    return [
        Chunk(text, f"{document}/{number}", document=document, start=start)
        for number, (text, start) in enumerate(zip(MARA, STARTS, strict=True))
    ]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained("reference", store=tmp_path_factory.mktemp("kv")) as engine:
        engine.add(chunks("mara"))
        yield engine


@pytest.fixture
def store(engine: BlendEngine) -> Iterator[KVStore]:
    assert engine.store.path is not None
    store = open_store(engine.store.path, 1 << 24)
    yield store
    store.close()


class _Noted(Attachment):
    """Notes the KV of a prompt."""

    kv: list[LayerKV]

    @contextmanager
    def around(self, forward: RunningForward) -> Iterator[None]:
        yield
        self.kv = forward.cache.kv()


def prefilled(engine: BlendEngine, *segments: Any) -> list[LayerKV]:
    """The KV that decoding a prompt would go on with, by layer."""
    with closing(engine.attach(_Noted())) as noted:
        engine.prefill(BlendPrompt(segments=segments))
    return noted.kv


def prefix_of(engine: BlendEngine, order: Sequence[int], head: str = "Read this.\n") -> StoredPrefix:
    segments: list[Any] = [head, *(ChunkRef(f"mara/{number}") for number in order), "Who lives in Oakford?"]
    return stored_prefix(engine, BlendPrompt(segments=segments))


def test_what_a_request_says_is_what_the_connector_reads(engine: BlendEngine) -> None:
    prefix = prefix_of(engine, (2, 0))
    params = json.loads(json.dumps(transfer_params(prefix)))
    assert asked_pieces(params) == (engine.namespace, prefix.pieces)
    assert asked_pieces(None) is None
    assert asked_pieces({"do_remote_decode": True}) is None
    assert asked_spool(spool_params("0" * 32)) == "0" * 32
    assert asked_spool(params) is None


@pytest.mark.parametrize(
    "asked",
    [
        7,
        ["n", 3],
        ["n", [["0" * 40, 0]]],
        ["n", [["../../etc/passwd", 0, 3]]],
        ["n", [["0" * 40, -1, 3]]],
        ["n", [["0" * 40, 0, 0]]],
        [1, []],
    ],
)
def test_nonsense_is_told_as_such(asked: Any) -> None:
    with pytest.raises(ConfigError):
        asked_pieces({"cacheblend": asked})


@pytest.mark.parametrize("name", ["../kv", "", "0" * 31, 7, "0" * 31 + "/", "0" * 32 + "\n"])
def test_no_file_outside_of_the_spool_is_written(name: Any) -> None:
    with pytest.raises(ConfigError):
        asked_spool({"cacheblend_spool": name})


def test_salts_tell_apart_what_tokens_do_not(engine: BlendEngine) -> None:
    engine.add(chunks("another"))
    one = prefix_of(engine, (1, 0))
    segments = ["Read this.\n", ChunkRef("another/1"), ChunkRef("mara/0"), "Who lives in Oakford?"]
    assert stored_prefix(engine, BlendPrompt(segments=segments)).salt == one.salt
    alone = BlendPrompt(segments=["Read this.\n", Chunk(MARA[1]), Chunk(MARA[0]), "Who lives in Oakford?"])
    assert stored_prefix(engine, alone).token_ids == one.token_ids
    assert stored_prefix(engine, alone).salt != one.salt
    assert prefix_of(engine, (0, 1)).salt != one.salt
    with engine.for_tenant("other") as other:
        other.add(chunks("mara"))
        theirs = prefix_of(other, (1, 0))
        assert theirs.token_ids == one.token_ids
        assert theirs.salt != one.salt


def test_a_prefix_ends_where_text_stands_that_no_kv_covers(engine: BlendEngine) -> None:
    segments = ["Read this.\n", ChunkRef("mara/2"), "\n\n", ChunkRef("mara/0"), "Who?"]
    prefix = stored_prefix(engine, BlendPrompt(segments=segments))
    assert len(prefix.pieces) == 2
    assert "separator" in prefix.ends


def test_a_prefix_ends_where_kv_is_missing_which_is_encoded_for_the_next_time(engine: BlendEngine) -> None:
    engine.add([Chunk("A new one.\n", "new")], background=True)
    segments = ["Read this.\n", ChunkRef("mara/0"), ChunkRef("new"), ChunkRef("mara/1"), "Who?"]
    engine.flush()
    evict(engine, "new")
    prefix = stored_prefix(engine, BlendPrompt(segments=segments))
    assert len(prefix.pieces) == 2
    assert "'new'" in prefix.ends
    engine.flush()
    assert len(stored_prefix(engine, BlendPrompt(segments=segments)).pieces) == 4


@given(st.data())
def test_slots_are_where_the_blocks_are(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 16, 32, 128]))
    blocks = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
    stop = data.draw(st.integers(1, size * len(blocks)))
    first = data.draw(st.integers(0, stop - 1))
    expected = [blocks[place // size] * size + place % size for place in range(first, stop)]
    assert slots_of(blocks, size, first, stop).tolist() == expected


def test_ranks_have_their_heads() -> None:
    tensor = torch.arange(4)[:, None, None]
    assert [heads_of(tensor, rank, 2).flatten().tolist() for rank in range(2)] == [[0, 1], [2, 3]]
    assert [heads_of(tensor[:2], rank, 4).flatten().tolist() for rank in range(4)] == [[0], [0], [1], [1]]


def loaded(store: KVStore, card: ModelCard, load: Load) -> list[LayerKV]:
    layers: list[LayerKV] = []
    load_prefix(store, card, load, lambda _, kv: layers.append(LayerKV(*(each.clone() for each in kv))))
    return layers


def test_what_is_loaded_is_what_the_engine_blends(engine: BlendEngine, store: KVStore) -> None:
    prefix = prefix_of(engine, (2, 0, 1))
    own = prefilled(engine, "Read this.\n", *(ChunkRef(f"mara/{n}") for n in (2, 0, 1)), "Who lives in Oakford?")
    stop = prefix.num_stored
    whole = loaded(store, engine.card(), Load(prefix.token_ids[:stop], prefix.namespace, prefix.pieces, 0, stop))
    for layer, kv in zip(whole, own, strict=True):
        for part, expected in zip(layer, kv, strict=True):
            torch.testing.assert_close(part, expected[0, :, :stop], atol=1e-5, rtol=1e-5)
    for first, last in ((3, stop), (0, 9), (11, 12)):
        load = Load(prefix.token_ids[:last], prefix.namespace, prefix.pieces, first, last)
        for layer, all_of_it in zip(loaded(store, engine.card(), load), whole, strict=True):
            for part, expected in zip(layer, all_of_it, strict=True):
                torch.testing.assert_close(part, expected[:, first:last])


def test_kv_of_other_tokens_is_not_loaded(engine: BlendEngine, store: KVStore) -> None:
    prefix = prefix_of(engine, (2, 0))
    one, stop = prefix.pieces[1], prefix.num_stored
    card = engine.card()
    other = prefix_of(engine, (0, 2)).pieces[1]
    for changed, namespace in ((other.key, prefix.namespace), (one.key, "f" * 32), ("0" * 40, prefix.namespace)):
        pieces = (prefix.pieces[0], PrefixPiece(changed, 0, one.tokens), prefix.pieces[2])
        with pytest.raises(ChunkReadError):
            loaded(store, card, Load(prefix.token_ids[:stop], namespace, pieces, 0, stop))


class Shuffling:
    """A backend that lays a block out in an order of its own."""

    def __init__(self, block: int, heads: int, size: int) -> None:
        self.order = torch.randperm(2 * block * heads * size, generator=torch.Generator().manual_seed(1))
        self.shape = (block, heads, size)

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block, heads, size = self.shape
        flat = cache.view(cache.shape[0], -1)
        for row, slot in enumerate(slots.tolist()):
            number, place = divmod(slot, block)
            for part, tensor in enumerate((keys, values)):
                first = (part * block + place) * heads * size
                flat[number, self.order[first : first + heads * size]] = tensor[row].flatten()


class Layer:
    """What vLLM's attention layer shows of itself."""

    def __init__(self, block: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self.impl = Shuffling(block, heads, size)
        self.num_kv_heads, self.head_size = heads, size
        self.kv_cache = torch.zeros(7, heads, block, 2 * size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_is_read_whatever_the_layout(dtype: torch.dtype) -> None:
    block, heads, size, count = 32, 3, 24, 71
    layer = Layer(block, heads, size, dtype)
    keys, values = torch.randn(2, count, heads, size).to(dtype)
    blocks = [5, 1, 3]
    slots = slots_of(blocks, block, 0, count)
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
    found = BlockReader(dtype).rows(layer, slots)
    assert torch.equal(found.keys, keys.transpose(0, 1))
    assert torch.equal(found.values, values.transpose(0, 1))


def put(layer: Any, kv: LayerKV, slots: torch.Tensor) -> None:
    keys, values = (part.transpose(0, 1) for part in kv)
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)


@pytest.mark.parametrize("fault", ["", "no writer", "others' arguments", "read back differently"])
def test_a_vllm_is_refused_by_what_it_does_with_its_blocks(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(32, 3, 24, torch.bfloat16)
    name, write = "model.layers.0.attn", layer.impl.do_kv_cache_update
    if fault == "no writer":
        monkeypatch.delattr(Shuffling, "do_kv_cache_update")
    elif fault == "others' arguments":
        monkeypatch.setattr(Shuffling, "do_kv_cache_update", lambda impl, keys, values: None)
    elif fault:
        # Slots that count from the last one on.
        monkeypatch.setattr(
            layer.impl,
            "do_kv_cache_update",
            lambda *args: write(*args[:-1], args[3].shape[0] * 32 - 1 - args[-1]),
        )
    if not fault:
        check_blocks((Group(32, {0: name}),), {name: layer}, put, BlockReader(torch.bfloat16))
        assert not layer.kv_cache.any()
        return
    with pytest.raises(ConfigError, match=name):
        check_blocks((Group(32, {0: name}),), {name: layer}, put, BlockReader(torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"quantization": "awq"}, "quantization"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"hf_overrides": {"rope_theta": 1}}, "hf_overrides"),
        ({"rope_reach": 1024}, "rotary"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"use_mla": True}, "latent"),
        ({"heads": 3}, "another model"),
        ({"spec": SimpleNamespace(block_size=32, state=1)}, "no KV of each token"),
    ],
)
def test_a_vllm_is_refused_by_what_it_runs(engine: BlendEngine, changes: dict[str, Any], said: str) -> None:
    """Its layers are in two groups, as full and sliding ones are."""
    changes = dict(changes)
    card = replace(engine.card(), rope_reach=changes.pop("rope_reach", None))
    heads, size, _ = card.shapes[0]
    cached = changes.pop("cache_dtype", "auto")
    spec = SimpleNamespace(block_size=32, num_kv_heads=changes.pop("heads", heads), head_size=size, head_size_v=size)
    spec = changes.pop("spec", spec)
    names = [f"model.layers.{number}.self_attn.attn" for number in range(card.num_kv_layers)]
    groups = [SimpleNamespace(layer_names=part, kv_cache_spec=spec) for part in (names[::2], names[1::2])]
    known = {"dtype": card.dtype, "quantization": None, "use_mla": False, "hf_overrides": {}, "max_model_len": 2048}
    model = SimpleNamespace(**known | changes)
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, cache_config=SimpleNamespace(cache_dtype=cached)
    )
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_fit(config, SimpleNamespace(kv_cache_groups=groups), card, FULL)


def test_a_release_that_was_not_tested_is_refused_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check_release("0.32.1+cpu")
    with pytest.raises(ConfigError, match=r"0\.33\.0"):
        check_release("0.33.0")
    monkeypatch.setenv("ALLOW_UNTESTED_VLLM", "1")
    check_release("0.33.0")


def test_the_spool_puts_ranks_together_and_is_left_empty(tmp_path: Path) -> None:
    tensor = torch.randn(2, 4, 5, 6)
    for rank in range(2):
        part = LayerKV(*(each[2 * rank : 2 * rank + 2].contiguous() for each in tensor))
        write_spool(tmp_path, "a" * 32, rank, {0: part})
    [found] = read_spool(tmp_path, "a" * 32, [4])
    assert torch.equal(found.keys, tensor[0])
    assert torch.equal(found.values, tensor[1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["nothing", "damaged", "a rank is missing", "a layer is missing"])
def test_what_cannot_be_read_of_the_spool_is_told_and_removed(tmp_path: Path, fault: str) -> None:
    heads = 2 if fault == "a rank is missing" else 4
    layers = {} if fault == "a layer is missing" else {0: LayerKV(*torch.randn(2, heads, 5, 6))}
    if fault != "nothing":
        write_spool(tmp_path, "a" * 32, 0, layers)
    if fault == "damaged":
        [path] = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BackendError):
        read_spool(tmp_path, "a" * 32, [4])
    assert not list(tmp_path.iterdir())


def test_a_library_without_weights_stores_what_the_engine_stores(
    engine: BlendEngine, store: KVStore, tmp_path: Path
) -> None:
    """Another process computes; here that is transformers, asked for whole prompts."""
    spool, is_gone = tmp_path / "kv" / "tmp", False
    asked: list[tuple[int, ...]] = []
    salts: list[str] = []

    def warm(prompts: Sequence[tuple[str, tuple[int, ...]]], salt: str, is_awaited: bool) -> None:
        salts.append(salt)
        for name, ids in prompts:
            if is_gone and len(asked) % 2:
                raise BackendError("vLLM broke off")
            asked.append(ids)
            kv = prefilled(engine, [*ids, 5])
            layers = {
                number: LayerKV(*(part[0, :, : len(ids)].contiguous() for part in each))
                for number, each in enumerate(kv)
            }
            write_spool(spool, name, 0, layers)

    known, store = store, open_store(tmp_path / "kv", 1 << 26)
    config = EngineConfig(disk_codec="native")
    beyond = len(engine.tokenizer)
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_tokens(["<beyond>"])
    with VLLMLibrary(engine.card(), tokenizer, store, warm, config=config, num_embeddings=beyond) as library:
        added = library.add(chunks("mara"))
        # Each chunk right behind the preamble; behind passages one reading is the beginning of another.
        assert (added.encoded, len(asked)) == (3, 5)
        segments = ["Read this.\n", *(ChunkRef(f"mara/{n}") for n in (2, 0)), "Who lives in Oakford?"]
        prefix = stored_prefix(library, BlendPrompt(segments=segments))
        expected = prefix_of(engine, (2, 0))
        assert (prefix.token_ids, prefix.pieces, prefix.salt) == (expected.token_ids, expected.pieces, expected.salt)
        for piece in prefix.pieces:
            here, there = store.open(piece.key), known.open(piece.key)
            assert here is not None and there is not None
            for layer in range(here.num_layers):
                for part, other in zip(here.layer(layer), there.layer(layer), strict=True):
                    torch.testing.assert_close(part, other.to(part.dtype), atol=1e-4, rtol=1e-4)
        assert not list(spool.iterdir())
        assert len(set(salts)) == 1
        with library.for_tenant("other") as other:
            other.add(chunks("mara"))
            # vLLM itself takes what either the tokenizer or the model knows.
            with pytest.raises(PromptError, match=f"token {beyond}"):
                stored_prefix(other, BlendPrompt(segments=[[beyond]]))
        # No tenant can tell by the time what another has added.
        assert len(set(salts)) == 2
        with pytest.raises(PromptError, match="places"):
            library.add([Chunk("Placed.", "placed", token_ids=(50, 60, 70), positions=(3, 5, 9))])
        # It keeps its name, as what cannot be encoded does.
        assert (library.delete_document("mara"), library.delete(["placed"]), library.ids()) == (3, 1, [])
        # Of what was written before vLLM broke off nothing is left.
        is_gone = True
        with pytest.raises(BackendError):
            library.add([Chunk(f"Number {number} sings.", f"{number}") for number in range(3)])
        assert not list(spool.iterdir())
    store.close()
    with pytest.raises(ConfigError, match="folder"), closing(open_store(None, 1 << 20)) as memory:
        VLLMLibrary(engine.card(), tokenizer, memory, warm)
