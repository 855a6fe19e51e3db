"""Schemas in an engine: what is encoded, where it stands, what a prompt reuses, and what it gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.settings import engine_settings
from cacheblend_pml import Import, Module, Param, Prompt, Scaffold, Schema, Schemas, Text, Union
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from tests.core.gapped import own_logits
from tests.engines import store_of
from tests.families import tiny_tokenizer, words
from tests.limits import wait_until

TOLERANCE = 1e-4
# Behind the BOS alone, which every prompt begins with.
REUSE = engine_settings(recompute_ratio=0.0, strict=True, preamble="")


def make(family: str = "llama", store: Path | None = None, **changes: int | str) -> BlendEngine:
    settings = engine_settings(REUSE, **changes)
    return BlendEngine(tiny_model(tiny_config(family)), tiny_tokenizer(), store=store, **settings)


# Rotary, learned positions.
@pytest.fixture(params=["llama", "gpt2"])
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    with make(request.param) as made:
        yield made


def module(name: str, count: int, *more: object) -> Module:
    return Module(name, (Text(words(count, sum(map(ord, name)))), *more))  # type: ignore[arg-type]


def trip() -> Schema:
    """Anonymous texts, a parameter, a union of members of different sizes, a module nested in one of them."""
    plan = Module("plan", (Text(words(6, 1)), Param("days", 5), Text(words(4, 2))))
    overseas = module("overseas", 7, module("tokyo", 5), Text(words(3, 8)))
    return Schema("trip", (Text(words(8, 3)), plan, Union((module("home", 4), overseas)), Text(words(5, 4))))


def prompt_of(engine: BlendEngine, schema: Schema, *children: Import | str) -> BlendPrompt:
    return Schemas(engine).prompt(Prompt(schema, children))


def some_prompt(engine: BlendEngine, schema: Schema, days: str = "t5 t6") -> BlendPrompt:
    plan = Import("plan", {"days": days})
    return prompt_of(engine, schema, plan, Import("overseas", {}, (Import("tokyo"),)), words(4, 9))


def test_with_all_encoded_together_logits_are_the_models_own(engine: BlendEngine) -> None:
    union = Union((module("a", 6), module("b", 11)))
    outer = module("c", 4, module("inner", 3), Text(words(2, 5)))
    together = Scaffold((Text(words(5, 1)), union, outer, module("left-out", 9), module("d", 6)))
    schema = Schema("together", (together,))
    prompt = prompt_of(engine, schema, Import("a"), Import("c", {}, (Import("inner"),)), Import("d"), words(4, 9))
    layout = engine.prompt_layout(prompt)
    assert len(layout) < layout.end_position, "there are gaps where modules were left out"
    own = own_logits(engine.model, layout.token_ids, layout.positions)
    first, again = engine.prefill(prompt), engine.prefill(prompt)
    assert (first.report.hits, again.report.hits, again.report.recomputed_tokens) == (0, 1, 0)
    for result in (first, again):
        assert (result.logits - own).abs().max() < TOLERANCE * own.abs().max()


def test_apart_modules_do_not_see_each_other_but_any_selector_can_make_up_for_it(engine: BlendEngine) -> None:
    schema = trip()
    loaded = Schemas(engine).load(schema)
    assert (loaded.parts, loaded.encoded) == (6, 6) and Schemas(engine).names == ["trip"]
    prompt = some_prompt(engine, schema)
    layout = engine.prompt_layout(prompt)
    own = own_logits(engine.model, layout.token_ids, layout.positions)
    reuse = engine.prefill(prompt)
    assert (reuse.report.misses, reuse.report.hits, reuse.report.recomputed_tokens) == (0, 5, 0)
    assert (reuse.logits - own).abs().max() > 10 * TOLERANCE * own.abs().max()
    for changes in ({"recompute_ratio": 0.999}, {"enabled": False}):
        whole = engine.prefill(prompt, blend=engine.blend.replace(**changes))
        assert (whole.logits - own).abs().max() < TOLERANCE * own.abs().max()


def test_changing_one_module_of_twenty_encodes_one() -> None:
    def schema(changed: int) -> Schema:
        return Schema("twenty", tuple(module(f"m{n}", 5 + 3 * (n == changed)) for n in range(20)))

    with make() as engine:
        schemas = Schemas(engine)
        assert schemas.load(schema(-1)).encoded == 20
        assert (schemas.load(schema(-1)).encoded, schemas.load(schema(-1)).unchanged) == (0, 20)
        # The others move by three positions, and keep their KV.
        after = schemas.load(schema(4))
        assert (after.encoded, after.unchanged, after.removed) == (1, 19, 0)
        assert schemas.load(Schema("twenty", schema(4).children[:19])).removed == 1
        assert sorted(engine.ids()) == sorted(f"pml/twenty/m{n}" for n in range(19))
        assert schemas.unload("twenty") == 19
        assert engine.ids() == []
        with pytest.raises(ConfigError):
            schemas.unload("twenty")


def test_where_positions_are_learned_what_has_moved_is_encoded_again() -> None:
    def schema(first: Module) -> Schema:
        return Schema("three", (first, module("b", 6), module("c", 7)))

    with make("gpt2") as engine:
        assert Schemas(engine).load(schema(module("a", 5))).encoded == 3
        assert Schemas(engine).load(schema(module("a", 8))).encoded == 3
        assert Schemas(engine).load(schema(Module("a", (Text(words(8, 77)),)))).encoded == 1


def test_a_module_that_is_a_stored_chunk_has_its_kv_already() -> None:
    text = words(12, 5)
    with make() as engine:
        engine.add([Chunk(text, "node")])
        schema = Schema("documents", (module("head", 5), Module("doc", (Text(text),))))
        assert engine.prefill(prompt_of(engine, schema, Import("doc"), "t4 t5")).report.hits == 1
        assert Schemas(engine).load(schema).encoded == 1
        # The document keeps its KV when the schema goes.
        Schemas(engine).unload("documents")
        assert engine.prefill(BlendPrompt("", ["node"], "t4")).report.hits == 1


def test_a_prompt_that_ends_with_a_module_computes_its_last_token_alone() -> None:
    schema = Schema("ends", (module("a", 6), module("b", 7)))
    with make() as engine:
        Schemas(engine).load(schema)
        result = engine.prefill(prompt_of(engine, schema, Import("a"), Import("b")))
        assert [chunk.tokens for chunk in result.report.chunks] == [6, 6]
        assert result.report.prompt_tokens == 14


@pytest.mark.parametrize("by_loading", [True, False])
def test_members_of_a_union_are_read_into_ram_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_loading: bool
) -> None:
    schema = Schema("ahead", (Union(tuple(module(f"u{n}", 12 + n) for n in range(3))),))
    with make(store=tmp_path) as engine:
        Schemas(engine).load(schema)
    with make(store=tmp_path) as engine:
        with monkeypatch.context() as patch:
            if not by_loading:
                patch.setattr(engine, "prefetch", list)
            assert Schemas(engine).load(schema).encoded == 0
        if not by_loading:
            assert engine.prefill(prompt_of(engine, schema, Import("u0"), "t4")).report.chunks[0].tier == "disk"
        [record] = engine.records(["pml/ahead/u2"])
        assert record is not None
        wait_until(lambda: getattr(store_of(engine).open(record.key), "tier", None) == "ram")
        assert engine.prefill(prompt_of(engine, schema, Import("u2"), "t4")).report.chunks[0].tier == "ram"


def test_two_schemas_of_one_name_in_two_tenants_do_not_meet(tmp_path: Path) -> None:
    schema = trip()
    with make(store=tmp_path, tenant="one") as one:
        Schemas(one).load(schema)
        with make(store=tmp_path, tenant="two") as two:
            assert Schemas(two).load(schema).encoded == 6
            Schemas(two).unload("trip")
        assert Schemas(one).load(schema).encoded == 0


def test_many_prompts_loaded_or_not_are_answered_as_each_alone(engine: BlendEngine) -> None:
    schema = trip()
    prompts = [some_prompt(engine, schema, days) for days in ("t5", "t5 t6 t7", "")]
    misses = engine.generate_many(prompts, 4, do_sample=False)
    Schemas(engine).load(schema)
    prompts = [some_prompt(engine, schema, days) for days in ("t5", "t5 t6 t7", "")]
    many = engine.generate_many(prompts, 4, do_sample=False)
    for prompt, *results in zip(prompts, misses, many, strict=True):
        alone = engine.generate(prompt, 4, do_sample=False).token_ids
        assert [result.token_ids for result in results] == [alone, alone]
    assert [result.report.alone_reason for result in many] == [None] * 3


def test_what_cannot_be_served_is_refused() -> None:
    prompt = Prompt(trip(), (Import("plan", {"days": ""}),))
    with make() as engine:
        for call in (engine.generate, engine.prompt_layout, engine.generate_many):
            with pytest.raises(ConfigError, match="Prompt"):
                call(prompt)
    with make("bart") as engine, pytest.raises(UnsupportedModelError):
        Schemas(engine).load(trip())
    with pytest.raises(ConfigError):
        Schemas(object())  # type: ignore[arg-type]
