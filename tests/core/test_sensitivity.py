"""How much tokens depend on their neighbours: measured when chunks are added, kept with their KV, read by selectors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.codec import codec_names, make_codec, pack_kv
from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import inspect_model
from cacheblend_rag.selection import make_selector, num_neighbours
from tests.core.dense import dense_blend, own_kv, stale_kv
from tests.core.test_selectors import LENGTH, SPANS, _Layered
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import key_of, make_kv, read, same

TOLERANCE = 1e-4
MODEL = tiny_model("llama")
CHUNKS = [Chunk(words(12 + seed, seed), f"n{seed}") for seed in range(6)]
FAMILIES = [
    ("llama", "sdpa"),
    ("llama-yarn", "sdpa"),
    ("mistral", "eager"),
    ("qwen3-moe", "sdpa"),
    ("gemma2", "eager"),
    ("gpt-neox", "sdpa"),
    ("glm4", "sdpa"),
    ("smollm3", "sdpa"),
]


def naive(model: PreTrainedModel, prefix: Sequence[int], before: Sequence[int], chunk: Sequence[int]) -> list[float]:
    """The sensitivity of a chunk's tokens, from two whole forwards at the same positions: no key is ever moved."""
    behind = own_kv(model, [*prefix, *before, *chunk])
    alone = own_kv(model, [*prefix, *chunk], first_position=len(before))
    layers = range(1, -(-2 * len(behind) // 3))
    total = torch.zeros(len(chunk))
    for layer in layers:
        for new, old in zip(behind[layer], alone[layer], strict=True):
            new, old = new[0, :, -len(chunk) :], old[0, :, -len(chunk) :]
            total += (new - old).square().sum(dim=(0, 2)) / old.square().sum(dim=(0, 2))
    return (total / (2 * len(layers))).tolist()


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [int(word[1:]) for chunk in chunks for word in chunk.text.split()]


def make(store: Path | None = None, **changes: object) -> BlendEngine:
    settings = {"strict": True, "self_check": False, "selector": "ingest"} | changes
    return BlendEngine(MODEL, tiny_tokenizer(), config=BlendConfig(**settings), store=store)  # type: ignore[arg-type]


def measured(engine: BlendEngine, id: str) -> tuple[float, ...] | None:
    [record] = engine.records([id])
    assert record is not None
    reader = engine.store.open(record.key)
    assert reader is not None
    return reader.sensitivity


def behind(chunk: Chunk, before: Sequence[Chunk]) -> object:
    return pytest.approx(naive(MODEL, [1], ids_of(before), ids_of([chunk])), rel=1e-3, abs=TOLERANCE)


@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_it_is_what_a_naive_computation_gives(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    decoder = inspect_model(model)
    # Longer than the sliding windows.
    before, chunk = ids_of([Chunk(words(25, 1))]), ids_of([Chunk(words(20, 2))])
    for prefix in ([1], ids_of([Chunk(words(20, 3))])):
        encoder = Encoder(decoder, prefix, 64)
        [[(_, kv)]] = encoder.encode([Target(tuple(chunk))])
        got, wanted = torch.tensor(encoder.sensitivity(kv, before)), torch.tensor(naive(model, prefix, before, chunk))
        assert (got - wanted).abs().max() < TOLERANCE * wanted.max().clamp_min(1)
        assert got.max() > 0.01


def test_a_chunk_stands_behind_those_before_it_in_its_call() -> None:
    with make() as engine:
        assert engine.neighbours == 2
        engine.add(CHUNKS)
        # Of the first one nothing stands before it.
        assert measured(engine, "n0") == behind(CHUNKS[0], CHUNKS[1:3])
        assert measured(engine, "n1") == behind(CHUNKS[1], CHUNKS[:1])
        for number in range(2, 6):
            assert measured(engine, f"n{number}") == behind(CHUNKS[number], CHUNKS[number - 2 : number])


def test_a_chunk_stands_behind_the_neighbours_that_it_names() -> None:
    with make(neighbours=2) as engine:
        engine.add(CHUNKS[:2])
        named = Chunk(words(9, 40), "named", neighbours=["nobody", "n0", "later", "named", "n1"])
        later = Chunk(words(7, 41), "later", neighbours=("nobody", "named"))
        lost = Chunk(words(8, 42), "lost", neighbours=("nobody",))
        engine.add([named, later, lost])
        assert measured(engine, "named") == behind(named, [later, CHUNKS[1]])
        assert measured(engine, "later") == behind(later, [named])
        assert measured(engine, "lost") == behind(lost, [named, later])
        # What is evicted is known by its tokens still.
        engine.store.discard(engine.records(["n0"])[0].key)  # type: ignore[union-attr]
        more = Chunk(words(8, 43), "more", neighbours=("n0",))
        engine.add([more])
        assert measured(engine, "more") == behind(more, CHUNKS[:1])


def test_what_is_not_measured() -> None:
    with make() as engine:
        engine.add([CHUNKS[0]])
        engine.add([Chunk(CHUNKS[1].text, "n1", neighbours=("nobody",)), Chunk(CHUNKS[1].text, "twin")])
        assert measured(engine, "n0") is measured(engine, "n1") is None
        # A miss: the answer does not wait.
        engine.prefill(BlendPrompt("t5", [CHUNKS[2], CHUNKS[3]], "t6"))
        engine.flush()
        assert measured(engine, "n2") is measured(engine, "n3") is None
        # Alone, and with nobody to stand behind, there is still nothing to measure.
        assert engine.add([CHUNKS[0]]).encoded == 0
        assert measured(engine, "n0") is None
    for settings in ({"neighbours": 0}, {"selector": "hkvd"}, {"selector": "auto"}):
        with make(**settings) as engine:
            assert engine.neighbours == 0
            engine.add(CHUNKS[:2])
            assert measured(engine, "n1") is None
    with make(encode_on="second_use") as engine:
        assert engine.neighbours == 0
    with make(selector="hkvd", neighbours=1) as engine:
        engine.add(CHUNKS[:3])
        assert measured(engine, "n2") == behind(CHUNKS[2], CHUNKS[1:2])


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_a_prompt_computed_again_is_measured_when_it_is_added_again(
    tmp_path: Path, on_disk: bool, background: bool
) -> None:
    # Wherever copies are kept.
    with make(tmp_path if on_disk else None, device_bytes=10**8) as engine:
        engine.add(CHUNKS)
        wanted = [measured(engine, f"n{number}") for number in range(6)]
        lost = engine.records(["n2", "n3"])
        for record in lost:
            assert record is not None
            engine.store.discard(record.key)
        engine.prefill(BlendPrompt("t5", CHUNKS[1:4], "t6"))
        engine.flush()
        assert measured(engine, "n2") is measured(engine, "n3") is None
        progress: list[tuple[int, int]] = []
        options: dict[str, Any] = {"progress": lambda *each: progress.append(each), "background": background}
        added = engine.add(CHUNKS, **options)
        result = added.result() if background else added
        assert (result.encoded, result.named, result.unchanged) == (2, 0, 4)
        assert (progress[0], progress[-1]) == ((4, 6), (6, 6))
        assert [measured(engine, f"n{number}") for number in range(6)] == wanted
        # What is measured is not computed again, whatever its neighbours are.
        again = engine.add([Chunk(CHUNKS[0].text, "n0", neighbours=("n5",)), *CHUNKS[1:]])
        assert (again.encoded, again.unchanged) == (0, 6)
        assert engine.store.stats().entries == 6
    if on_disk:
        with make(tmp_path) as engine:
            assert [measured(engine, f"n{number}") for number in range(6)] == wanted


def test_what_is_measured_later_lives_no_shorter(tmp_path: Path) -> None:
    with make(tmp_path, ttl_s=1000) as engine:
        engine.prefill(BlendPrompt("t5", CHUNKS[:2], "t6"))
        engine.flush()
        engine.add(CHUNKS[:2], ttl_s=10)
        assert measured(engine, "n1") is not None
        [record] = engine.records(["n1"])
        assert record is not None
        [life] = engine.store.lifetimes([record.key])
        assert life is not None and 900 < life <= 1000


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("tiers", ["ram", "disk", "both"])
def test_what_is_pinned_stays_so_when_it_is_measured_or_encoded_again(
    tmp_path: Path, tiers: str, background: bool
) -> None:
    # Room for about three of the six.
    one = 20_000
    budgets = {"ram_bytes": 0 if tiers == "disk" else 3 * one, "disk_bytes": 3 * one}
    chunks = [Chunk(words(20, seed), f"n{seed}") for seed in range(6)]

    def add(engine: BlendEngine, some: Sequence[Chunk]) -> None:
        added = engine.add(some, background=background)
        if background:
            added.result()  # type: ignore[union-attr]
        engine.flush()

    def is_kept(engine: BlendEngine) -> bool:
        """Whether it is still there when all others have come and gone."""
        add(engine, chunks[2:])
        [record] = engine.records(["n1"])
        assert record is not None
        return engine.store.holds([record.key]) == [True]

    with make(None if tiers == "ram" else tmp_path, device_bytes=10**6, **budgets) as engine:
        # Stored by a prompt, so not measured.
        engine.prefill(BlendPrompt("t5", chunks[:2], "t6"))
        engine.flush()
        engine.pin(["n1"])
        pinned = engine.store.stats().pinned_bytes
        assert pinned > 0
        assert measured(engine, "n1") is None

        add(engine, chunks[:2])
        wanted = measured(engine, "n1")
        assert wanted is not None
        assert pinned <= engine.store.stats().pinned_bytes < 1.1 * pinned
        assert is_kept(engine)

        # As when its file turns out damaged: a miss of a prompt, and then measured again.
        [record] = engine.records(["n1"])
        assert record is not None
        engine.store.discard(record.key)
        assert engine.store.stats().pinned_bytes == 0
        engine.prefill(BlendPrompt("t5", chunks[:2], "t6"))
        engine.flush()
        assert engine.store.stats().pinned_bytes == pinned
        add(engine, chunks[:2])
        assert measured(engine, "n1") == wanted
        assert is_kept(engine)

        engine.unpin(["n1"])
        assert engine.store.stats().pinned_bytes == 0
        assert not is_kept(engine)


def test_auto_uses_what_is_measured() -> None:
    assert {
        name: num_neighbours(BlendConfig(selector=name)) for name in ("auto", "ingest", "query_ingest", "query")
    } == {
        "auto": 0,
        "ingest": 2,
        "query_ingest": 2,
        "query": 0,
    }
    assert make_selector(BlendConfig(selector="auto")).name == "hkvd"
    assert make_selector(BlendConfig(selector="auto", neighbours=0)).name == "hkvd"
    assert make_selector(BlendConfig(selector="auto", neighbours=2)).name == "ingest"
    # What is encoded when it is retrieved is never measured.
    assert make_selector(BlendConfig(selector="auto", neighbours=2, encode_on="second_use")).name == "hkvd"


def test_auto_is_the_same_for_a_call_as_for_its_engine() -> None:
    with BlendEngine(tiny_model("llama", "sdpa"), tiny_tokenizer(), config=BlendConfig(neighbours=2)) as engine:
        engine.add([Chunk(words(20, number), f"n{number}") for number in range(3)])
        prompt = BlendPrompt(words(4, 10), ["n0", "n1", "n2"], words(6, 12))
        assert engine.prefill(prompt).report.selector == "ingest"
        assert engine.prefill(prompt, config=BlendConfig(recompute_ratio=0.3)).report.selector == "ingest"


def test_neighbours_are_shortened_to_the_models_window() -> None:
    long = [Chunk(words(length, length), f"n{length}") for length in (300, 310, 400, 511)]
    with make() as engine:
        assert engine.window == 512
        engine.add(long)
        tokens = ids_of(long[:2])[-(512 - 1 - 400) :]
        wanted = naive(MODEL, [1], tokens, ids_of(long[2:3]))
        assert measured(engine, "n400") == pytest.approx(wanted, rel=1e-3, abs=TOLERANCE)
        assert measured(engine, "n511") is None
        # One that fills the window is not measured by an estimate either.
        assert engine.estimate([Chunk(words(511, 1)), Chunk(words(511, 2))]).seconds > 0


def test_the_background_measures_the_same() -> None:
    with make() as one, make() as other:
        one.add(CHUNKS)
        other.add(CHUNKS, background=True).result()
        assert all(measured(one, id) == measured(other, id) is not None for id in one.ids())


@pytest.mark.parametrize("background", [False, True])
def test_a_prompt_goes_before_what_is_still_to_be_measured(background: bool) -> None:
    with make(neighbours=1) as engine:
        engine.add(CHUNKS[:2])
        supply = engine._supply
        measure = supply._encoder.sensitivity  # type: ignore[union-attr]
        started, go_on, order = threading.Event(), threading.Event(), []

        def slow(*arguments: object) -> object:
            started.set()
            go_on.wait(30)
            order.append("measured")
            return measure(*arguments)  # type: ignore[arg-type]

        supply._encoder.sensitivity = slow  # type: ignore[method-assign, union-attr, assignment]
        adding = threading.Thread(target=lambda: engine.add(CHUNKS[2:], background=background))
        asking = threading.Thread(target=lambda: engine.prefill(BlendPrompt("t5", ["n0"], "t6")))
        # Of all that is computed, prompts alone go through the model's head.
        handle = MODEL.register_forward_pre_hook(lambda _, __: order.append("prompt"))
        adding.start()
        assert started.wait(30)
        asking.start()
        while not supply.lock._line:
            pass
        go_on.set()
        asking.join()
        adding.join()
        engine.flush()
        handle.remove()
    # One batch of four chunks; the prompt came while the first was measured.
    assert order.count("measured") == 4
    assert order.index("prompt") == 1


def test_an_estimate_counts_the_second_forward_and_stores_nothing() -> None:
    with make() as engine:
        rows: list[int] = []
        handle = MODEL.get_decoder().register_forward_pre_hook(
            lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with handle:
            estimate = engine.estimate(CHUNKS)
        assert rows == [1 + 17, 1 + 15 + 16 + 17]
        assert (estimate.chunks, estimate.tokens, engine.ids()) == (6, len(ids_of(CHUNKS)), [])


def test_deleting_a_chunk_deletes_what_was_measured_of_it() -> None:
    with make() as engine:
        engine.add(CHUNKS)
        keys = [record.key for record in engine.records(["n1", "n2"]) if record is not None]
        engine.delete(["n1", "n2"])
        assert [engine.store.open(key) for key in keys] == [None, None]
        assert measured(engine, "n3") is not None
        # Measured anew, behind what it comes with now.
        again = Chunk(CHUNKS[1].text, "n1", neighbours=("n5",))
        engine.add([again])
        assert measured(engine, "n1") == behind(again, [CHUNKS[5]])


@pytest.mark.parametrize(
    "settings", [{}, {"ram_bytes": 0}, {"device_bytes": 10**8}, {"disk_codec": "int4", "ram_codec": "int8"}]
)
def test_every_tier_chooses_the_same_tokens(tmp_path: Path, settings: dict[str, object]) -> None:
    prompt = BlendPrompt("t5", [chunk.id for chunk in CHUNKS], "t6 t7")  # type: ignore[misc]
    with make(tmp_path, **settings) as engine:
        engine.add(CHUNKS)
        wanted = [measured(engine, f"n{number}") for number in range(6)]
        assert None not in wanted
        counts = [chunk.recomputed_tokens for chunk in engine.prefill(prompt).report.chunks]
    with make(tmp_path, **settings) as engine:
        for _ in range(3):
            assert [chunk.recomputed_tokens for chunk in engine.prefill(prompt).report.chunks] == counts
            assert [measured(engine, f"n{number}") for number in range(6)] == wanted


@pytest.mark.parametrize("codec", codec_names())
def test_every_codec_keeps_it(codec: str) -> None:
    kv = make_kv(1)
    packed = pack_kv(kv, make_codec(codec))
    assert packed.sensitivity == pack_kv(packed, make_codec("native")).sensitivity == kv.sensitivity is not None


def test_a_file_brings_it_back(tmp_path: Path) -> None:
    from cacheblend_rag.store import open_store

    for ram_bytes in (0, 10**6):
        store = open_store(tmp_path / str(ram_bytes), ram_bytes)
        for number in (1, 2):
            store.put(key_of(number), make_kv(number))
        store.close()
        store = open_store(tmp_path / str(ram_bytes), ram_bytes)
        for _ in range(2):
            # The second time from RAM, where there is room.
            readers = [store.open(key_of(number)) for number in (1, 2)]
            assert all(reader is not None and same(read(reader), make_kv(n)) for n, reader in enumerate(readers, 1))
        store.close()


# Query time.


def prompt_and_engine(**settings: object) -> tuple[BlendEngine, BlendPrompt, list[int]]:
    """The prompt of the other selectors' tests, and an engine that was given its chunks; the middle one was not measured."""
    config = BlendConfig(recompute_ratio=12 / 62, strict=True, stop_layer=6, self_check=False, **settings)  # type: ignore[arg-type]
    engine = BlendEngine(tiny_model("llama", "eager"), tiny_tokenizer(), config=config)
    chunks = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20))]
    engine.add([chunks[1]])
    engine.add([chunks[0], chunks[2]])
    refs = [ChunkRef(f"n{number}") for number in range(3)]
    prompt = BlendPrompt(segments=[words(4, 10), *refs[:2], words(3, 11), refs[2], words(6, 12)])
    ids = list(engine.prompt_ids(prompt))
    assert len(ids) == LENGTH
    return engine, prompt, ids


def candidate_scores(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The sensitivity of every chunk token of that prompt; of the middle chunk, the average."""
    first, middle, last = ([ids[row] for row in range(a, b)] for a, b in SPANS)
    known = torch.tensor([naive(model, [1], last, first), naive(model, [1], first, last)])
    return torch.cat([known[0], known.mean().expand(len(middle)), known[1]])


@torch.no_grad()
def test_ingest_recomputes_the_most_sensitive_tokens() -> None:
    engine, prompt, ids = prompt_and_engine(selector="ingest", segment_tokens=1)
    with engine:
        result = engine.prefill(prompt)
        rows = torch.cat([torch.arange(a, b) for a, b in SPANS])
        chosen = rows[candidate_scores(engine.model, ids).topk(12).indices].sort().values
        wanted = dense_blend(engine.model, ids, SPANS, [1], recomputed=chosen)
    assert (result.logits - wanted).abs().max() < TOLERANCE
    assert result.report.recomputed_tokens == 12
    assert result.report.charged_ratio == pytest.approx(12 / 62)


@torch.no_grad()
def test_query_ingest_recomputes_what_the_question_needs_and_the_context_changes() -> None:
    looks = (1, 2)
    engine, prompt, ids = prompt_and_engine(selector="query_ingest", segment_tokens=1, look_layers=looks)
    with engine:
        report = engine.prefill(prompt).report
        stale = stale_kv(engine.model, ids, SPANS, [1])
        rows = torch.cat([torch.arange(a, b) for a, b in SPANS])
        seen = engine.model(
            input_ids=torch.tensor([ids]),
            past_key_values=_Layered(stale, [rows] * len(stale)),
            use_cache=True,
            output_attentions=True,
        ).attentions
        attention = torch.zeros(rows.numel())
        for layer in looks:
            mass = seen[layer][0, :, -1][:, rows].sum(dim=0)
            attention += mass / mass.sum()
        chosen = set(rows[(attention * candidate_scores(engine.model, ids)).topk(12).indices].tolist())
    assert [chunk.recomputed_tokens for chunk in report.chunks] == [len(chosen & set(range(a, b))) for a, b in SPANS]


@pytest.mark.parametrize("selector", ["ingest", "query_ingest"])
def test_without_anything_measured_it_works_and_says_so_once(selector: str, caplog: pytest.LogCaptureFixture) -> None:
    with make(selector=selector, neighbours=0, recompute_ratio=0.15) as engine:
        engine.add(CHUNKS)
        prompt = BlendPrompt("t5", [chunk.id for chunk in CHUNKS], "t6 t7")  # type: ignore[misc]
        with caplog.at_level(logging.WARNING):
            reports = [engine.prefill(prompt).report for _ in range(2)]
        assert reports[0].recomputed_tokens == reports[1].recomputed_tokens > 0
    [message] = [each.getMessage() for each in caplog.records]
    assert f"selector='{selector}'" in message and "neighbours=2" in message
    with make(selector=selector, recompute_ratio=0.15) as engine, caplog.at_level(logging.WARNING):
        caplog.clear()
        engine.add(CHUNKS[:3])
        # One of them was measured, which is enough.
        engine.prefill(BlendPrompt("t5", ["n0", CHUNKS[5]], "t6"))
        assert not caplog.records


def refuse(*_: object) -> None:
    raise AssertionError("opened")


@pytest.mark.parametrize(
    "settings",
    [{"recompute_ratio": 1.0}, {"enabled": False}, {"selector": "full"}, {"min_tokens": 1000}],
    ids=lambda each: next(iter(each)),
)
def test_nothing_is_opened_for_a_prompt_that_is_computed_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    with make() as engine:
        engine.add(CHUNKS[:2])
        monkeypatch.setattr(engine.store, "open", refuse)
        report = engine.prefill(
            BlendPrompt("t5", ["n0", CHUNKS[4], "n1"], "t6"), config=engine.config.replace(**settings)
        ).report
    assert report.charged_ratio == 1
    assert (report.hits, report.misses, [chunk.hit for chunk in report.chunks]) == (2, 1, [True, False, True])


@pytest.mark.parametrize("wrong", ["n1", 7, [""], [3], {"n1"}, None], ids=repr)
def test_neighbours_are_ids(wrong: object) -> None:
    with pytest.raises(ConfigError, match="neighbours of chunk 'n0'"):
        Chunk("t5", "n0", neighbours=wrong)  # type: ignore[arg-type]


def test_neighbours_are_no_part_of_a_chunk() -> None:
    one, other = Chunk("t5", "n0", neighbours=["n1"]), Chunk("t5", "n0")
    assert one == other and hash(one) == hash(other)
    assert one.neighbours == ("n1",)


def test_settings_of_neighbours() -> None:
    with pytest.raises(ConfigError, match="neighbours=-1"):
        BlendConfig(neighbours=-1)
    with make() as engine, pytest.raises(ConfigError, match="neighbours=5 cannot be set for one call"):
        engine.prefill(BlendPrompt("t5", [], "t6"), config=BlendConfig(neighbours=5))
    assert make_selector(BlendConfig(selector="ingest")).needs_sensitivity
