"""The engine's door: hits and misses, names, generation, streams and threads."""

import asyncio
import functools
import gc
import math
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from cacheblend_lab.families import tiny_config
from cacheblend_lab.families import tiny_model as family_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from cacheblend_rag.preamble import default_preamble
from tests.engines import MakeEngine, evict
from tests.families import tiny_tokenizer, words

TOLERANCE = 1e-4
ENGINE = {"strict": True, "selector": "hkvd", "recompute_ratio": 0.15}
CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20, 17))]


def _prompt(chunks: list[Chunk], seed: int = 50) -> BlendPrompt:
    return BlendPrompt(words(4, seed), chunks, words(6, seed + 1))


def test_adding_the_same_does_nothing_and_another_text_replaces(engine: BlendEngine) -> None:
    first = engine.add(CHUNKS)
    assert (first.encoded, first.named, first.unchanged, first.tokens) == (4, 4, 0, 79)
    assert engine.add(CHUNKS).encoded == 0
    changed = engine.add([Chunk(words(9, 99), "n0")])
    assert (changed.encoded, changed.tokens) == (1, 9)
    assert sorted(engine.ids()) == ["n0", "n1", "n2", "n3"]
    assert engine.prefill(_prompt([Chunk(CHUNKS[0].text), CHUNKS[1]])).report.hits == 1


def test_logits_behind_the_last_tokens(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    alone = engine.prefill(_prompt(CHUNKS))
    several = engine.prefill(_prompt(CHUNKS), logits_to_keep=3)
    assert several.logits.shape == (3, *alone.logits.shape)
    assert (several.logits[-1] - alone.logits).abs().max() < TOLERANCE
    # A prompt without its last token ends where the one before it stands.
    shorter = BlendPrompt(words(4, 50), CHUNKS, " ".join(words(6, 51).split()[:-1]))
    assert (engine.prefill(shorter).logits - several.logits[-2]).abs().max() < TOLERANCE


def test_the_ids_of_a_prompt(engine: BlendEngine) -> None:
    for prefix in ("<bos> t5", "t5"):
        assert engine.prompt_ids(BlendPrompt(prefix, [], "t6")) == (1, 5, 6)
    assert engine.prompt_ids(BlendPrompt(segments=[[1, 5], [6]])) == (1, 5, 6)
    chunks = [Chunk("t10"), Chunk("t11"), Chunk("t12")]
    assert engine.prompt_ids(BlendPrompt("t5", chunks, "t6", separator="t7")) == (1, 5, 10, 7, 11, 7, 12, 6)


def test_a_stream_is_the_answer_and_ends_where_it_is_closed_or_left(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    answer = engine.generate(_prompt(CHUNKS), 16, do_sample=False)
    stream = engine.stream(_prompt(CHUNKS), 16, do_sample=False)
    assert "".join(stream) == answer.text
    assert stream.result().token_ids == answer.token_ids
    assert stream.result().report.hits == 4
    assert answer.report.output_tokens == len(answer.token_ids) <= 16
    closed = engine.stream(_prompt(CHUNKS), 400, do_sample=True, eos_token_id=-1)
    first = next(closed)
    closed.close()
    assert closed.result().text == first + "".join(closed)
    assert len(closed.result().token_ids) < 400
    left = engine.stream(_prompt(CHUNKS), 400, do_sample=True, eos_token_id=-1)
    next(left)
    del left
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "cacheblend-stream":
            thread.join(20)
            assert not thread.is_alive()


class Held(StoppingCriteria):
    """Keeps the model busy at its first token, until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.begun.set()
        self.go_on.wait(60)
        return torch.tensor([True])


def test_a_call_waits_for_the_model_as_long_as_it_was_told(engine: BlendEngine) -> None:
    held = Held()
    stream = engine.stream(_prompt(CHUNKS), 4, stopping_criteria=[held])
    held.begun.wait(60)
    try:
        late = engine.stream(_prompt(CHUNKS), 4, wait_s=0.01)
        for ask in (
            late.result,
            lambda: list(late),
            lambda: engine.generate(_prompt(CHUNKS), 4, wait_s=0),
            # The second has chunks to encode first.
            lambda: engine.generate_many([_prompt(CHUNKS[:2])] * 2, 4, wait_s=0.01),
            lambda: engine.generate_many([_prompt([Chunk(words(30, 9))])] * 2, 4, wait_s=0.01),
            lambda: asyncio.run(engine.agenerate_many([_prompt(CHUNKS)], 4, wait_s=0.01)),
        ):
            with pytest.raises(AnswerTimeoutError):
                ask()
        waiting = engine.stream(_prompt(CHUNKS), 4, wait_s=60)
    finally:
        held.go_on.set()
    assert stream.result().token_ids
    assert waiting.result().token_ids == engine.generate(_prompt(CHUNKS), 4, wait_s=0).token_ids
    assert engine.generate(_prompt(CHUNKS), 4, wait_s=math.inf).token_ids
    for wait_s in (-1, math.nan, "soon"):
        with pytest.raises(ConfigError, match="wait_s"):
            engine.generate(_prompt(CHUNKS), 4, wait_s=wait_s)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was(engine: BlendEngine) -> None:
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        before = engine.model(input_ids=ids).logits
        engine.prefill(_prompt(CHUNKS))
        # A model that was patched stays so.
        engine.model.forward = patched = functools.partial(engine.model.forward)
        engine.generate_many([_prompt(CHUNKS), _prompt(CHUNKS[:1])], 3)
        assert engine.model.forward is patched
        assert torch.equal(engine.model(input_ids=ids).logits, before)
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_a_checkpoints_own_wish_for_beams_or_another_cache_is_set_aside(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    wanted = engine.generate(_prompt(CHUNKS), 8, do_sample=False).token_ids
    engine.model.generation_config.num_beams = 3
    engine.model.generation_config.cache_implementation = "static"
    assert engine.generate(_prompt(CHUNKS), 8, do_sample=False).token_ids == wanted


def test_a_report_of_a_whole_prefill_claims_no_reuse(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    report = engine.prefill(_prompt(CHUNKS), blend=engine.blend.replace(enabled=False)).report
    assert (report.recompute_ratio, report.charged_ratio, report.recomputed_tokens) == (1.0, 1.0, 79)
    assert {(c.hit, c.recomputed_tokens == c.tokens, c.reason) for c in report.chunks} == {(True, True, None)}


def test_a_chunk_deleted_while_it_is_encoded_is_not_kept(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:1])
    evict(engine, "n0")

    def delete(*_: Any) -> None:
        engine.delete(["n0"])

    with engine.model.get_decoder().register_forward_pre_hook(delete):
        assert engine.prefill(BlendPrompt("t5", ["n0"], "t6")).report.misses == 1
    engine.flush()

    assert (engine.ids(), engine.store.stats().entries) == ([], 0)


def test_nothing_is_left_of_what_prompts_met_once_it_is_deleted(make_engine: MakeEngine, tmp_path: Path) -> None:
    prompt = BlendPrompt("t5", [CHUNKS[0], Chunk(CHUNKS[1].text)], "t6")
    with make_engine(tmp_path / "kv") as engine:
        engine.prefill(prompt)
        assert engine.prefill(prompt).report.hits == 2
        for seed in range(60, 64):
            engine.prefill(BlendPrompt("t5", [Chunk(words(9, seed), "n0")], "t6"))
        engine.flush()
        engine.delete(engine.ids())
    with make_engine(tmp_path / "kv") as after:
        assert after.store.stats().entries == 0
        assert not list((tmp_path / "kv").rglob("*.safetensors"))


DATED = "Today is {{ strftime_now('%d %B %Y') }}.\n{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (None, ""),
        ("{{ raise_exception('no users') }}", ""),
        ("{{ 'nothing of yours' }}", ""),
        ("{% broken", ""),
        # The same tomorrow.
        (DATED, "Today is 01 January 2026.\n<user>"),
    ],
)
def test_the_preamble_begins_as_a_chat_does(template: str | None, opening: str) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    text = default_preamble(tokenizer)
    assert text.startswith(f"{opening}Use the following pieces of context")
    assert f"{datetime.now():%d %B %Y}" not in text
    assert default_preamble(load_tokenizer()).startswith("<s><|user|>\nUse the following pieces of context")


def test_a_prompt_with_another_head_is_served_and_who_names_another_preamble_shares_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add([Chunk(words(9, 1), "a")])
    for head in ("", words(3, 2), words(30, 3)):
        assert engine.prefill(BlendPrompt(head, ["a"], "t5")).report.hits == 1
    others = [make_engine(model=engine.model, preamble=text) for text in ("", "t5 t6")]
    assert len({each.namespace for each in (engine, *others)}) == 3
    # Where KV cannot be moved, it stands behind the BOS.
    fixed = make_engine(model=family_model(tiny_config("gpt2")))
    fixed.add([Chunk(words(9, 1), "a")])
    assert fixed.prefill(BlendPrompt("", ["a"], "t5")).report.hits == 1
