"""Chunks with gaps between their positions, and parts of chunks, on every kind of position."""

from collections.abc import Iterator

import pytest
import torch

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chunk import ChunkPart
from cacheblend_rag.errors import ConfigError, PromptError, PromptTooLongError
from tests.core.dense import dense_blend
from tests.core.gapped import own_logits
from tests.families import tiny_tokenizer

TOLERANCE = 1e-4
BOS = 1
# Rotary, and learned positions.
FAMILIES = ["llama", "gpt_neox", "gpt2", "opt"]
# Behind the BOS alone, which every prompt begins with.
REUSE = engine_settings(recompute_ratio=0.0, strict=True, preamble="")


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    with BlendEngine(tiny_model(tiny_config(request.param)), tiny_tokenizer(), **REUSE) as made:
        yield made


def places(*runs: tuple[int, int]) -> tuple[int, ...]:
    return tuple(position for start, stop in runs for position in range(start, stop))


def test_prefill_and_decoding_are_the_models_own_with_gaps(engine: BlendEngine) -> None:
    at = places((1, 9), (14, 20), (31, 42))
    together = Chunk("together", "s", token_ids=some_ids(len(at), 1), positions=at)
    question = some_ids(5, 2)
    engine.add([together])
    prompt = BlendPrompt(segments=[[BOS], together, question], positions=[0, 1, 50])
    result = engine.prefill(prompt)
    [chunk] = result.report.chunks
    assert (chunk.hit, chunk.tokens, chunk.recomputed_tokens) == (True, len(at), 0)
    assert (result.report.hits, result.report.misses) == (1, 0)
    positions = [0, *at, *range(50, 55)]
    layout = engine.prompt_layout(prompt)
    assert layout.positions == tuple(positions)
    own = own_logits(engine.model, layout.token_ids, positions)
    assert (result.logits - own).abs().max() < TOLERANCE * own.abs().max()
    # The gaps are seen: closed up, the same tokens give other logits.
    closed = own_logits(engine.model, layout.token_ids, range(len(layout)))
    assert (closed - own).abs().max() > 100 * TOLERANCE * own.abs().max()
    whole = engine.blend.replace(enabled=False)
    ids = list(layout.token_ids)
    assert (engine.prefill(prompt, blend=whole).logits - own).abs().max() < TOLERANCE * own.abs().max()
    answers = [engine.generate(prompt, 6, blend=blend, do_sample=False).token_ids for blend in (None, whole)]
    wanted: list[int] = []
    for step in range(len(answers[0])):
        wanted.append(int(own_logits(engine.model, ids + wanted, [*positions, *range(55, 55 + step)]).argmax()))
    assert answers == [tuple(wanted)] * 2


def test_a_module_is_served_around_the_rows_that_an_argument_takes(engine: BlendEngine) -> None:
    module = Chunk("module", "m", token_ids=some_ids(20, 3), positions=range(1, 21))
    engine.add([module])
    prompt = BlendPrompt(
        segments=[[BOS], ChunkPart(module, 0, 6), some_ids(4, 4), ChunkPart(module, 10, 20), some_ids(4, 5)],
        positions=[0, 1, 7, 11, 21],
    )
    result = engine.prefill(prompt)
    [chunk] = result.report.chunks
    assert (chunk.id, chunk.tokens, chunk.hit, result.report.hits) == ("m", 16, True, 1)
    # Rows of the whole module, cut.
    behind = [[BOS], [BOS, *module.token_ids[:10]]]
    none = torch.tensor([], dtype=torch.int64)
    own = dense_blend(engine.model, engine.prompt_ids(prompt), [(1, 7), (11, 21)], behind, recomputed=none)
    assert (result.logits - own).abs().max() < TOLERANCE * own.abs().max()


def test_the_start_is_part_of_the_key_only_where_kv_cannot_be_moved(engine: BlendEngine) -> None:
    ids = some_ids(12, 6)
    assert engine.decoder is not None
    engine.add([Chunk("a", "here", token_ids=ids, positions=range(1, 13))])
    again = engine.add([Chunk("a", "there", token_ids=ids, positions=range(40, 52))])
    assert again.encoded == (0 if engine.decoder.is_movable else 1)
    keys = {record.key for record in engine.records(["here", "there"]) if record is not None}
    assert len(keys) == (1 if engine.decoder.is_movable else 2)
    gapped = engine.add([Chunk("a", "gapped", token_ids=ids, positions=[*range(1, 7), *range(9, 15)])])
    assert gapped.encoded == 1


def test_positions_that_do_not_fit_are_refused(engine: BlendEngine) -> None:
    chunk = Chunk("a", "g", token_ids=some_ids(4, 1), positions=[1, 2, 6, 7])
    # A chunk with gaps wants positions.
    with pytest.raises(ConfigError):
        engine.prefill(BlendPrompt(segments=[chunk, "t3"]))
    if engine.window is not None:
        with pytest.raises(PromptTooLongError):
            engine.add([Chunk("a", "far", token_ids=some_ids(2, 1), positions=[1, 100_000])])
    for wrong in ({"token_ids": [3, 4], "positions": [1]}, {"positions": [1]}):
        with pytest.raises(ConfigError):
            Chunk("a", **wrong)
    for positions in ([2, 2], [-1, 2]):
        with pytest.raises(ConfigError):
            Chunk("a", token_ids=[3, 4], positions=positions)
    for start, stop in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError):
            ChunkPart(chunk, start, stop)


@pytest.mark.parametrize("family", ["bart", "bloom", "mpt"])
def test_models_that_count_their_tokens_refuse_gaps(family: str) -> None:
    with BlendEngine(tiny_model(tiny_config(family)), tiny_tokenizer(), **REUSE) as engine:
        with pytest.raises(PromptError):
            engine.prefill(BlendPrompt(segments=["t3 t4", "t5"], positions=[0, 9]))
