"""The catalog keeps in step with the engine by whatever door chunks come and go."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chat.catalog import ChunkCatalog
from cacheblend_rag.chunk import Segment, text_hash
from tests.families import tiny_reader

SETTINGS = engine_settings(self_check=False)


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    return tiny_reader()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


def split(catalog: ChunkCatalog, engine: BlendEngine, text: str) -> list[Segment]:
    catalog.follow(engine)
    return catalog.split(engine, text)


def ids_in(catalog: ChunkCatalog, engine: BlendEngine, text: str) -> list[str | None]:
    segments = split(catalog, engine, text)
    assert "".join(part.text if isinstance(part, Chunk) else str(part) for part in segments) == text
    return [part.id for part in segments if isinstance(part, Chunk)]


def test_an_earlier_process(tiny: LlamaForCausalLM, tokenizer: Any, tmp_path: Path) -> None:
    chunks = dict(zip("abc", TEXTS[1:3] + TEXTS[4:], strict=True))
    with BlendEngine(tiny, tokenizer, store=tmp_path, **SETTINGS) as engine:
        engine.add(Chunk(text, id) for id, text in chunks.items())
    with BlendEngine(tiny, tokenizer, store=tmp_path, **SETTINGS) as engine:
        catalog = ChunkCatalog()
        assert ids_in(catalog, engine, "\n".join(chunks.values())) == list(chunks)
        with BlendEngine(tiny, tokenizer, store=tmp_path, **SETTINGS) as other:
            other.delete(["c"])
            other.add([Chunk("Somebody else wrote this line.", "else")])
        assert ids_in(catalog, engine, "\n".join([*chunks.values(), "Somebody else wrote this line."])) == [
            "a",
            "b",
            "else",
        ]


TEXTS = (
    "Mara Lind was born in Oslo and moved north.",
    "Mara Lind was born in Oslo and moved north. She came back.",
    "A striped goat called Pim lives there too.",
    "too short",
    "日本語のテキストはここにあります。🙂🙃",
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("uvwxyz"), st.sampled_from(TEXTS)),
        st.tuples(st.just("retrieve"), st.sampled_from("uvwxyz"), st.sampled_from(TEXTS)),
        st.tuples(st.just("delete"), st.sampled_from("uvwxyz"), st.just("")),
    ),
    max_size=6,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(STEPS, min_size=1, max_size=4))
def test_following_changes(tiny: LlamaForCausalLM, tokenizer: Any, rounds: list[list[tuple[str, str, str]]]) -> None:
    with tempfile.TemporaryDirectory() as folder, BlendEngine(tiny, tokenizer, store=folder, **SETTINGS) as engine:
        catalog = ChunkCatalog()
        for steps in rounds:
            for step, id, text in steps:
                if step == "add":
                    engine.add([Chunk(text, id)])
                elif step == "delete":
                    engine.delete([id])
                else:
                    # A miss is named while its KV still waits to be written.
                    engine.prefill(BlendPrompt("", [Chunk(text, id)], "What?"))
            prompt = "; ".join(TEXTS)
            # Of two names of one text either may be taken.
            followed, fresh = split(catalog, engine, prompt), split(ChunkCatalog(), engine, prompt)
            assert [getattr(part, "text", part) for part in followed] == [getattr(part, "text", part) for part in fresh]
            assert [type(part) for part in followed] == [type(part) for part in fresh]
            for chunk in (part for part in followed if isinstance(part, Chunk)):
                (record,) = engine.records([str(chunk.id)])
                assert record is not None and record.text_hash == text_hash(chunk.text)
