"""What a schema and a prompt may say, what white space means, and what the messages of refusals are."""

import re
from pathlib import Path

import pytest

from cacheblend_pml import Import, Module, Param, Schema, SchemaLayout, Text, Tokens, Turn, Union, lay_out
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
  Last words.
</schema>"""
    ) == [
        (None, "First words.\n\n"),
        ("code", "def f():\n    return 1\n\nx = f()\n"),
        ("line", "One line.\n"),
        ("a", " kept "),
        ("b", "for "),
        ("b", "<n>"),
        ("b", "\ndays\n"),
        (None, "Last words.\n"),
    ]


def test_preserved_space_stays() -> None:
    assert texts('<schema name="s"><module name="a" xml:space="preserve">\nx\n</module></schema>') == [("a", "\nx\n")]


def test_character_references_and_cdata_are_text() -> None:
    assert texts('<schema name="s">a &lt; b &amp; c<![CDATA[ <d> ]]>&#233;</schema>') == [(None, "a < b & c <d> é")]


def test_what_is_included_stands_there(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tools.pml").write_text('<schema name="tools"><module name="t" src="tool.txt"/></schema>')
    (tmp_path / "tool.txt").write_text("A tool.\r\n  It works.\n")
    (tmp_path / "main.pml").write_text(
        '<schema name="main"><union><include src="shared/tools.pml"/></union><module name="m">M</module></schema>'
    )
    schema = Schema.from_file(tmp_path / "main.pml")
    assert schema.unions == (("t",),)
    assert schema.modules["t"].children == (Text("A tool.\n  It works.\n"),)
    assert Schema.from_text((tmp_path / "main.pml").read_text(), root=tmp_path) == schema


def test_includes_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pml").write_text('<schema name="a"><include src="b.pml"/></schema>')
    (tmp_path / "b.pml").write_text('<schema name="b">\n<include src="a.pml"/></schema>')
    with pytest.raises(PMLError, match=r"b\.pml, line 2, column 1: .* itself: a\.pml -> b\.pml -> a\.pml"):
        Schema.from_file(tmp_path / "a.pml")


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(PMLError, match="cannot be read: No such file"):
        Schema.from_file(tmp_path / "none.pml")
    (tmp_path / "bytes.pml").write_bytes(b"<schema name='s'>\xff</schema>")
    with pytest.raises(PMLError, match=r"bytes\.pml: this is not UTF-8 \(byte 17\)"):
        Schema.from_file(tmp_path / "bytes.pml")


def refusal(markup: str) -> str:
    with pytest.raises(PMLError) as caught:
        Schema.from_text(markup, source="s.pml")
    assert isinstance(caught.value, CacheBlendError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("", "s.pml: schema 's' is empty"),
        (
            "<module name='a'>x</module>\n<module name='a'>y</module>",
            "line 2, column 1: there is a module 'a' already",
        ),
        ("<module name='a'><module name='a'>y</module></module>", "there is a module 'a' already"),
        ("<module name='a'/>", "module 'a' is empty"),
        ("<module name='a'>\n  \n</module>", "module 'a' is empty"),
        ("<module>x</module>", '<module> needs name="..."'),
        ("<module name=' '>x</module>", '<module> needs name="..."'),
        ("<module name='a' nam='b'>x</module>", "<module> has no attribute 'nam'; expected name, src"),
        ("<modul name='a'>x</modul>", "<modul> is not known in a schema; did you mean <module>?"),
        ("<zzz/>", "expected one of <module>, <union>, <param>"),
        ("<union/>", "the union is empty"),
        ("<union>\n  text</union>", "line 2, column 3: text 'text' is in a union"),
        ("<union><union><module name='a'>x</module></union></union>", "a union is in a union, which may hold only modules"),
        ("<param name='p' len='3'/>", "parameter 'p' stands in no module"),
        ("<module name='a'><param len='3'/></module>", '<param> needs name="..."'),
        ("<module name='a'><param name='p'/></module>", '<param> needs len="..."'),
        ("<module name='a'><param name='p' len='3' length='3'/></module>", "has both len and length"),
        ("<module name='a'><param name='p' len='0'/></module>", "has the length 0; give the most tokens"),
        ("<module name='a'><param name='p' len='1e3'/></module>", 'has len="1e3"; give a whole number of tokens'),
        ("<module name='a'><param name='1p' len='1'/></module>", "'1p' cannot name a parameter"),
        ("<module name='a'><param name='p' len='1'>x</param></module>", "<param> holds something; expected <param .../>"),
        (
            "<module name='a'><param name='p' len='1'/>\n<scaffold><param name='p' len='1'/></scaffold></module>",
            "line 2, column 11: module 'a' has a parameter 'p' already, at line 1",
        ),
        ("<scaffold><module name='a'><scaffold>x</scaffold></module></scaffold>", "the scaffold stands in the one at line 1"),
        ("<user>x</user><module name='a'>x</module>", "module 'a' is outside of the messages"),
        ("<module name='a'><user>x</user></module>", "<user> stands in module 'a'; messages stand at the schema's top"),
        ("<user><assistant>x</assistant></user>", "<assistant> stands in <user>"),
        ("<module name='a' src='x.txt'/>", "was given no folder to read files from; give root=..."),
        ("<module name='a' xml:space='no'>x</module>", 'xml:space="no" means nothing'),
    ],
)  # fmt: skip
def test_a_wrong_schema_says_where_and_what_was_expected(inside: str, expected: str) -> None:
    assert expected in refusal(f"<schema name='s'>{inside}</schema>")


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
    ("inside", "expected"),
    [
        ("<plam days='3'/>", "schema 'travel' has no module 'plam'; did you mean 'plan'?"),
        ("<zzz/>", "has no module 'zzz'; it has plan, home, away, rome, oslo, 3 tips"),
        ("<plan/>", "module 'plan' has the parameter 'days', for which the import has no argument"),
        ("<plan days='3' city='x'/>", "module 'plan' has no parameter 'city'; it has days"),
        ("<rome/>", "module 'rome' is nested in module 'away'; import it inside of that: <plan><away><rome/>"),
        ("<plan days='3'><module name='3 tips'/></plan>", "module '3 tips' is not nested in 'plan'"),
        ("<plan days='3'><home/>\n<away/></plan>", "line 2, column 1: module 'away' and module 'home' are members of one union"),
        ("<plan days='3'/><plan days='3'/>", "module 'plan' was imported at line 1; a prompt imports a module once"),
        ("<user>x</user><plan days='3'/>", "<plan> stands after the <user> at line 1"),
        ("<user>x</user> more", "text stands after the <user> at line 1"),
        ("<user><plan days='3'/></user>", "<plan> is inside the prompt's <user>, which may hold only text"),
        ("<plan days='3'><user>x</user></plan>", "<user> stands in the import of 'plan'"),
        ("<module/>", '<module> needs name="..."'),
        ("<plan days='3'>", "expected </plan>, which closes the element at line 1"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_says_where_and_what_was_expected(inside: str, expected: str) -> None:
    with pytest.raises(PMLError) as caught:
        Schema.from_text(TRAVEL).parse_prompt(f"<prompt schema='travel'>{inside}</prompt>", source="p.pml")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("p.pml, line ")


def test_a_prompt_for_another_schema_and_no_prompt_at_all() -> None:
    schema = Schema.from_text(TRAVEL)
    with pytest.raises(PMLError, match="the prompt is for schema 'other'; expected schema='travel'"):
        schema.parse_prompt("<prompt schema='other'>x</prompt>")
    with pytest.raises(PMLError, match='expected <prompt schema="travel">, not <schema>'):
        schema.parse_prompt(TRAVEL)
    with pytest.raises(PMLError, match=re.escape('expected <schema name="...">, not <prompt>')):
        Schema.from_text("<prompt schema='travel'>x</prompt>")


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
    assert list(made.imports) == ["plan", "away", "oslo", "3 tips"]


def test_a_string_is_never_markup() -> None:
    schema = Schema.from_text(TRAVEL)
    layout = SchemaLayout(schema, Tokens(tokenize))
    found = lay_out(layout, schema.prompt("<plan days='3'/> & </prompt>"))
    assert found.token_ids == tokenize("<plan days='3'/> & </prompt>")


def test_a_schema_made_in_python_is_checked_like_any_other() -> None:
    schema = Schema("s", (Text("a"), Union((Module("m", (Text("b"), Param("p", 3))), Module("n", (Text("c"),))))))
    assert schema == Schema.from_text(
        "<schema name='s'>a<union><module name='m'>b<param name='p' len='3'/></module><module name='n'>c</module></union>"
        "</schema>"
    )
    with pytest.raises(PMLError, match="there is a module 'm' already"):
        Schema("s", (Module("m", (Text("b"),)), Module("m", (Text("b"),))))
    with pytest.raises(PMLError, match="has the length 0"):
        Schema("s", (Module("m", (Param("p", 0),)),))
    with pytest.raises(PMLError, match="cannot hold 'text', a str"):
        Schema("s", ("text",))  # type: ignore[arg-type]
    with pytest.raises(PMLError, match="a prompt holds 3, a int; give Import, Turn or text"):
        schema.prompt(3)  # type: ignore[arg-type]
