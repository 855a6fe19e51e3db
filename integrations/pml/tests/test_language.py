"""What a schema and a prompt may say, what white space means, and what the messages of refusals are."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_pml import (
    Import,
    Module,
    Param,
    Role,
    Scaffold,
    Schema,
    SchemaLayout,
    Text,
    Tokens,
    Turn,
    Union,
    lay_out,
)
from cacheblend_rag.errors import CacheBlendError, PMLError
from integrations.pml.tests.naive import tokenize


def texts(markup: str) -> list[tuple[str | None, str]]:
    layout = SchemaLayout(Schema.from_text(markup), Tokens(tokenize))
    return [(span.module, span.text or f"<{span.param.name}>") for span in layout.spans if span.text or span.param]


def test_white_space_around_tags_is_for_people() -> None:
    assert texts(
        """<schema name="s">
  First words.

  <module name="code">
    def f():
        return 1

    x = f()
  </module>

  <module name="line">One line.</module>
  <union>
    <module name="a"> kept </module> <module name="b">for <param name="n" len="2"/>
      days</module>
  </union>
  <module name="space" xml:space="preserve">
x
</module>
  a &lt; b &amp; c<![CDATA[ <d> ]]>&#233;
</schema>"""
    ) == [
        (None, "First words.\n\n"),
        ("code", "def f():\n    return 1\n\nx = f()\n"),
        ("line", "One line.\n"),
        ("a", " kept "),
        ("b", "for "),
        ("b", "<n>"),
        ("b", "\ndays\n"),
        ("space", "\nx\n"),
        (None, "a < b & c <d> é\n"),
    ]


def test_a_module_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tool.txt").write_bytes(b"A tool.\r\n  It works.")
    markup = '<schema name="main">\n<union><module name="t" src="tools/tool.txt"/>\n</union></schema>'
    (tmp_path / "main.pml").write_text(markup)
    schema = Schema.from_file(tmp_path / "main.pml")
    assert schema.modules["t"].children == (Text("A tool.\n  It works.\n"),)
    assert Schema.from_text(markup, root=tmp_path) == schema
    (tmp_path / "bytes.pml").write_bytes(b"<schema name='s'>\xff</schema>")
    for name in ("none.pml", "bytes.pml"):
        with pytest.raises(PMLError) as caught:
            Schema.from_file(tmp_path / name)
        assert caught.value.source == name


@pytest.mark.parametrize(
    ("inside", "line", "named"),
    [
        ("", None, "empty"),
        ("<module name='a'>x</module>\n<module name='a'>y</module>", 2, "'a'"),
        ("\n<module name='a'/>", 2, "module 'a'"),
        ("<module name='a'>\n  \n</module>", 1, "module 'a'"),
        ("\n<module>x</module>", 2, 'module name='),
        ("<module name='a' nam='b'>x</module>", 1, "attribute nam"),
        ("<module name='a'>\n<modul name='b'>x</modul></module>", 2, "<module name="),
        ("\n<union>\n  text</union>", 2, "at least one <module>"),
        ("<scaffold><param name='p' len='3'/></scaffold>", 1, "parameter 'p'"),
        ("<module name='a'>\n<param name='p'/></module>", 2, "len="),
        ("<module name='a'><param name='p' len='100001'/></module>", 1, "'100001'"),
        ("<module name='a'><param name='1p' len='1'/></module>", 1, "'1p'"),
        ("<module name='a'><param name='p' len='1'/>\n<scaffold><param name='p' len='1'/></scaffold></module>", 2, "'p'"),
        ("<scaffold><module name='a'>\n<scaffold>x</scaffold></module></scaffold>", 2, "scaffold"),
        ("<user>x</user>\n<module name='a'>x</module>", 2, "module 'a'"),
        ("<user>x</user>more", 1, "text 'more'"),
        ("<module name='a'><scaffold>\n<user>x</user></scaffold></module>", 2, "'user'"),
        ("<module name='a' src='x.txt'/>", 1, "root="),
        ("<module name='a' src='x.txt'>x</module>", 1, "src='x.txt'"),
        ("<module name='a' xml:space='no'>x</module>", 1, "attribute space"),
        ("a < b", 1, "&lt;"),
        ("<x:module name='a' xmlns:x='y'/>", 1, "namespace"),
    ],
)  # fmt: skip
def test_a_wrong_schema_says_where_and_what_is_wrong(inside: str, line: int | None, named: str) -> None:
    with pytest.raises(PMLError, match=re.escape(named)) as caught:
        Schema.from_text(f"<schema name='s'>{inside}</schema>", source="s.pml")
    assert isinstance(caught.value, CacheBlendError)
    assert (caught.value.source, caught.value.line) == ("s.pml", line)


TRAVEL = """<schema name="travel">
  <module name="plan">For <param name="days" len="9"/>
    <union>
      <module name="home">home</module>
      <module name="away">away <union><module name="rome">Rome</module><module name="oslo">Oslo</module></union></module>
    </union>
  </module>
  <module name="3 tips">tips</module>
</schema>"""


@pytest.mark.parametrize(
    ("inside", "line", "named"),
    [
        ("\n<zzz/>", 2, "'zzz'"),
        ("<plan/>", 1, "parameter 'days'"),
        ("<plan days='3' city='x'/>", 1, "parameter 'city'"),
        ("<rome/>", 1, "in module 'away'"),
        ("<plan days='3'><home/>\n<away/></plan>", 2, "module 'away' and module 'home'"),
        ("<plan days='3'/>\n<plan days='3'/>", 2, "at line 1"),
        ("<user>x</user> more", 1, "<user> at line 1"),
        ("<user>\n<plan days='3'/></user>", 1, "<plan>"),
        ("<plan days='3'>\n<user>x</user></plan>", 2, "Turn"),
        ("<user name='Ada'>x</user>", 1, "'name'"),
        ("<module/>", 1, "name="),
    ],
)  # fmt: skip
def test_a_wrong_prompt_says_where_and_what_is_wrong(inside: str, line: int, named: str) -> None:
    with pytest.raises(PMLError, match=re.escape(named)) as caught:
        Schema.from_text(TRAVEL).parse_prompt(f"<prompt schema='travel'>{inside}</prompt>", source="p.pml")
    assert (caught.value.source, caught.value.line) == ("p.pml", line)


def test_python_and_markup_make_the_same_prompt() -> None:
    schema = Schema.from_text(TRAVEL)
    written = schema.parse_prompt(
        '<prompt schema="travel"><plan days="3"><away><oslo/></away></plan><module name="3 tips"/>Go!<user>Now</user></prompt>'
    )
    made = schema.prompt(
        Import("plan", {"days": "3"}, [Import("away", children=[Import("oslo")])]),
        Import("3 tips"),
        "Go!",
        Turn("user", "Now"),
    )
    assert written == made
    for wrong in ("<prompt schema='other'>x</prompt>", "<prompt/>", TRAVEL):
        with pytest.raises(PMLError):
            schema.parse_prompt(wrong)
    # A string is never markup.
    assert lay_out(SchemaLayout(schema, Tokens(tokenize)), schema.prompt("<3 &")).token_ids == tokenize("<3 &")
    assert list(made.imports) == ["plan", "away", "oslo", "3 tips"]


def test_python_and_markup_make_the_same_schema() -> None:
    members = [Module("m", ["b", Param("p", 3)]), Module("n", "c")]
    made = Schema("s", [Role("system", "a"), Scaffold([Role("user", ["d", Union(members)])])])
    assert made == Schema.from_text(
        "<schema name='s'><system>a</system><scaffold><user>d<union><module name='m'>b<param name='p' len='3'/></module>"
        "<module name='n'>c</module></union></user></scaffold></schema>"
    )
    assert made.prompt(Import("m", {"p": "x"}), "Go!") == made.parse_prompt("<prompt schema='s'><m p='x'/>Go!</prompt>")


def nested(depth: int) -> Module:
    return Module(f"m{depth}", [nested(depth - 1)] if depth else "a")


MADE_WRONG: list[Callable[[], object]] = [
    lambda: Schema("s", ()),
    lambda: Schema("s", [Module("m", "b"), Module("m", "b")]),
    lambda: Schema("s", [Module("m", [Param("p", 0)])]),
    lambda: Schema("s", [Module(" ", "b")]),
    lambda: Schema("s", [Role("judge", "b")]),  # type: ignore[arg-type]
    lambda: Schema("s", [Param("p", 1)]),
    lambda: Union(["text"]),  # type: ignore[list-item]
    lambda: Schema("s", "a").prompt(3),  # type: ignore[arg-type]
    lambda: Schema("s", "a").prompt(Turn("judge", "b")),  # type: ignore[arg-type]
    lambda: Schema("s", [nested(64)]),
    lambda: Schema("s", [Module("m", [Param("p", 1)])]).prompt(Import("m", {"p": 3})),  # type: ignore[dict-item]
]


@pytest.mark.parametrize("make", MADE_WRONG)
def test_what_is_made_in_python_is_checked_like_any_other(make: Callable[[], object]) -> None:
    with pytest.raises(PMLError):
        make()
