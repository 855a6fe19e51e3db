"""Whatever a schema and a prompt look like: recomputed over its modules' KV, a prompt is the model's own at those positions."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.settings import engine_settings
from cacheblend_pml import Schema, Schemas
from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.errors import PMLError
from integrations.pml.tests.naive import items_markup, requests, schema_markup, schemas
from tests.core.gapped import own_logits

TOLERANCE = 1e-4


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each printable ASCII character, as the naive interpreter counts them."""
    vocabulary = {"<unk>": 0, "<bos>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>", pad_token="<unk>")


@pytest.fixture(scope="module", params=["llama", "bloom", "gpt2"])
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    full = engine_settings(selector="full", recompute_ratio=0.999, strict=True)
    with BlendEngine(tiny_model(tiny_config(request.param)), character_tokenizer(), **full) as made:
        yield made
    torch.set_num_threads(threads)


def check(engine: BlendEngine, data: st.DataObject) -> None:
    children = data.draw(schemas())
    items = data.draw(requests(children))
    schema = Schema.from_text(schema_markup(children))
    asked = schema.parse_prompt(f'<prompt schema="{schema.name}">{items_markup(items)}</prompt>')
    try:
        layout = engine.prompt_layout(Schemas(engine).prompt(asked))
    except PMLError:
        # A text that is longer than its gap, which the tests of the layout look at.
        return
    assert list(layout.positions) == sorted(set(layout.positions))
    assert all(layout.positions[span.start] == span.position for span in layout.chunks)
    own = own_logits(engine.model, layout.token_ids, layout.positions)
    loaded = data.draw(st.booleans())
    if loaded:
        Schemas(engine).load(schema)
    prompt = Schemas(engine).prompt(asked)
    reuse = engine.prefill(prompt, blend=engine.blend.replace(selector="none", recompute_ratio=0.0))
    assert reuse.report.recomputed_tokens == 0
    # What of a scaffold is encoded together depends on the prompt.
    assert not loaded or "Scaffold(" in repr(schema) or reuse.report.misses == 0
    blended = engine.prefill(prompt)
    assert blended.report.misses == 0
    assert (blended.logits - own).abs().max() < TOLERANCE * own.abs().max()
    # One chunk that stands as it was encoded has seen all that the prompt has.
    if _stands_as_encoded(engine, prompt):
        assert (reuse.logits - own).abs().max() < TOLERANCE * own.abs().max()


def _stands_as_encoded(engine: BlendEngine, prompt: BlendPrompt) -> bool:
    """Whether all chunks are pieces of one that stand right after the preamble, each where it was encoded."""
    chunks, start = engine.look_up(prompt)[0].chunks, len(engine._assembler.preamble)
    places = [chunk.position for chunk in chunks]
    encoded = [start + chunk.first if chunk.positions is None else chunk.positions[chunk.first] for chunk in chunks]
    firsts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
    return (
        len({chunk.key for chunk in chunks}) == 1
        and chunks[0].start == start
        and places == encoded
        and firsts == [chunk.first for chunk in chunks]
    )


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_recomputed_prompts_are_the_models_own(engine: BlendEngine, data: st.DataObject) -> None:
    check(engine, data)


@pytest.mark.full
@given(data=st.data())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_many_recomputed_prompts_are_the_models_own(engine: BlendEngine, data: st.DataObject) -> None:
    check(engine, data)
