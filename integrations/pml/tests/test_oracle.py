"""Whatever a schema and a prompt look like: recomputed over its modules' KV, a prompt is the model's own at those positions."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.settings import engine_settings
from cacheblend_pml import Schema, Schemas
from cacheblend_rag import BlendEngine
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


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    full = engine_settings(recompute_ratio=0.999, strict=True)
    with BlendEngine(tiny_model(tiny_config(request.param)), character_tokenizer(), **full) as made:
        yield made


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
    reuse = engine.prefill(prompt, blend=engine.blend.replace(recompute_ratio=0.0))
    assert reuse.report.recomputed_tokens == 0
    # What of a scaffold is encoded together depends on the prompt.
    assert not loaded or "Scaffold(" in repr(schema) or reuse.report.misses == 0
    blended = engine.prefill(prompt)
    assert blended.report.misses == 0
    assert (blended.logits - own).abs().max() < TOLERANCE * own.abs().max()


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_recomputed_prompts_are_the_models_own(engine: BlendEngine, data: st.DataObject) -> None:
    check(engine, data)


@pytest.mark.full
@given(data=st.data())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_many_recomputed_prompts_are_the_models_own(engine: BlendEngine, data: st.DataObject) -> None:
    check(engine, data)
