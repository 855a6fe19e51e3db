"""Positions against a naive interpreter of the paper, and the single rules by example."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_pml import Import, LaidOutPrompt, Schema, SchemaLayout, Tokens, lay_out
from cacheblend_rag.errors import PMLError
from integrations.pml.tests import naive

TOKENS = Tokens(naive.tokenize, naive.FILLER, (naive.BOS,))


def layout_of(markup: str) -> SchemaLayout:
    return SchemaLayout(Schema.from_text(markup), TOKENS)


def laid_out(schema: str, prompt: str) -> LaidOutPrompt:
    layout = layout_of(schema)
    return lay_out(layout, layout.schema.parse_prompt(prompt))


def check_schema(children: list) -> None:
    layout = layout_of(naive.schema_markup(children))
    for node, start in naive.starts(children, 1):
        if node[0] == "module":
            assert layout.extents[node[1]].start == start
            assert layout.extents[node[1]].stop == start + naive.size(node)
    assert layout.size == 1 + sum(naive.size(node) for node in children)


def check_prompt(children: list, items: list) -> None:
    layout = layout_of(naive.schema_markup(children))
    prompt = layout.schema.parse_prompt(f'<prompt schema="random">{naive.items_markup(items)}</prompt>')
    try:
        expected = naive.interpret(children, items)
    except naive.TooLong as error:
        with pytest.raises(PMLError, match=rf"\b{error.excess} more than"):
            lay_out(layout, prompt)
        return
    found = lay_out(layout, prompt)
    tokens = {}
    for segment in found.segments:
        kind = "cached" if segment.is_cached else "argument" if segment.param else "text"
        for offset, token in enumerate(segment.token_ids):
            tokens[segment.position + offset] = (token, kind)
        if segment.part is not None:
            part = found.parts[segment.part]
            rows = slice(segment.row, segment.row + len(segment))
            assert part.token_ids[rows] == segment.token_ids
            assert part.positions[rows] == tuple(range(segment.position, segment.stop))
    assert tokens == expected
    assert list(found.positions) == sorted(expected)
    assert found.cached_tokens == sum(kind == "cached" for _, kind in expected.values())
    slots = [part.token_ids[slot.start : slot.stop] for part in found.parts.values() for slot in part.slots]
    assert all(set(ids) == {naive.FILLER} for ids in slots)
    assert len(slots) == sum(len(layout.schema.modules[name].params) for name in prompt.imports)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_prompts_take_the_positions_of_the_paper(data: st.DataObject) -> None:
    children = data.draw(naive.schemas())
    check_schema(children)
    check_prompt(children, data.draw(naive.requests(children)))


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_prompts_take_the_positions_of_the_paper(data: st.DataObject) -> None:
    children = data.draw(naive.schemas())
    check_prompt(children, data.draw(naive.requests(children)))


def test_new_text_takes_the_place_of_what_is_left_out() -> None:
    schema = '<schema name="s"><module name="a">aa</module><module name="b">bbbb</module><module name="c">cc</module></schema>'
    found = laid_out(schema, '<prompt schema="s"><a/>new<c/>end</prompt>')
    shown = [(each.position, "".join(map(chr, each.token_ids))) for each in found.segments[1:]]
    assert shown == [(1, "aa"), (3, "new"), (7, "cc"), (9, "end")]
    for inside, excess in (("<a/>longer<c/>", 2), ("<a/>new<b/>", 3)):
        with pytest.raises(PMLError, match=f"{excess} more"):
            laid_out(schema, f'<prompt schema="s">{inside}</prompt>')


def test_a_scaffold_is_one_part_of_what_is_imported() -> None:
    schema = Schema.from_text(
        '<schema name="s">head<scaffold><module name="a">aa</module>-<module name="b">bb<module name="c">c</module></module>'
        '</scaffold><module name="d">dd</module></schema>'
    )
    layout = SchemaLayout(schema, TOKENS)
    assert [part.name for part in layout.parts] == ["#1", "a+b+c", "d"]
    some = lay_out(layout, schema.prompt(Import("a"), Import("b"), Import("d"), "?"))
    assert [part.name for part in some.parts.values()] == ["#1", "a+b", "d"]
    assert some.parts[2].positions == (5, 6, 7, 8, 9)
    # A union in it waits for the prompt.
    members = '<union><module name="a">a</module><module name="b">b</module></union>'
    layout = layout_of(f'<schema name="s"><scaffold>t{members}</scaffold></schema>')
    assert layout.parts == ()
    for asked, part in ((Import("b"), "b"), ("?", "#1")):
        assert [each.name for each in lay_out(layout, layout.schema.prompt(asked)).parts.values()] == [part]


def test_what_does_not_fit_is_refused() -> None:
    schema = '<schema name="s"><module name="m"><param name="time" len="4"/>!</module></schema>'
    with pytest.raises(PMLError, match="2 more") as caught:
        laid_out(schema, '<prompt schema="s">\n  <m time="3 days"/></prompt>')
    assert caught.value.line == 2
    # As it was before a change.
    old = Schema.from_text(schema.replace("!", "?"))
    with pytest.raises(PMLError):
        lay_out(layout_of(schema), old.prompt(Import("m", {"time": ""})))
