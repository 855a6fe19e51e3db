"""Documents that nobody meant to write: each is read, or refused with a place, and no file outside the root is in it."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cacheblend_pml import Import, Schema, SchemaLayout, Tokens, lay_out
from cacheblend_rag.errors import PMLError
from integrations.pml.tests.naive import tokenize

SEEDS = [
    """<schema name="travel">
  <system>You plan &lt;trips&gt;.</system>
  <user>
    <module name="plan">I go for <param name="days" len="5"/> days.
      <union><module name="rome">Rome</module><module name="oslo">Oslo <parameter name="month" length="3"/></module></union>
    </module>
  </user>
  <assistant>Gladly.</assistant>
</schema>""",
    """<schema name="files"><!-- files --><module name="a" src="a.txt"/>
  <scaffold><module name="b" src="folder/b.txt"/>x</scaffold>
  <module name="c" xml:space="preserve"> <![CDATA[ if a < b: ]]> </module></schema>""",
    """<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>
<schema name="laughs"><module name="a">&c;</module></schema>""",
    """<!DOCTYPE s [<!ENTITY file SYSTEM "file:///etc/passwd">]><schema name="file"><module name="a">&file;</module></schema>""",
    """<?xml version="1.0" encoding="utf-16"?><schema name="a"><module name="a" src="link.txt"/>../outside.txt</schema>""",
]
PROMPTS = [
    '<prompt schema="travel"><plan days="3"><oslo month="May"/></plan>By train.<user>Tell me more</user></prompt>',
    '<prompt schema="travel">now<module name="plan" days=""><rome/>x</module> then</prompt>',
]
PIECES = [
    "<", ">", "/", "&", '"', "'", "=", "<module", "</module>", "<union>", "</union>", "<param", "name=", 'len="0"',
    'len="99999999999"', 'src="../../etc/passwd"', 'src="pipe"', 'src=""', "&#0;", "&#xD800;", "&lt;", "<!--", "-->",
    "<![CDATA[", "]]>", "<?x?>", "\0", "\ud800", "\ufeff", "\u2028", "\x0b", "\r", "<user>", "</user>", "<scaffold>",
    'xml:space="preserve"', "<!DOCTYPE x>", "<plan>" * 70, "é", "\U0001f600", "<!ENTITY",
    "%x;", "xmlns='y'", "a:b",
]  # fmt: skip


def edited(text: str, pieces: list[tuple[int, int, int]]) -> str:
    """A document after some edits: a slice that is cut out, doubled or moved, or a piece put in."""
    for kind, at, which in pieces:
        at %= len(text) + 1
        if kind == 0:
            text = text[:at] + text[at + which % 20 :]
        elif kind == 1:
            text = text[: at + which % 40] + text[at:]
        elif kind == 2:
            other = which % (len(text) + 1)
            text = text[:at] + text[other : other + 12] + text[at:]
        else:
            text = text[:at] + PIECES[which % len(PIECES)] + text[at:]
    return text


edits = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000), st.integers(0, 2000)), min_size=1, max_size=6)
documents = st.builds(edited, st.sampled_from(SEEDS), edits) | st.text(max_size=80)
prompts = st.builds(edited, st.sampled_from(PROMPTS), edits)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files, a pipe, and a link that leads out of it."""
    folder = tmp_path_factory.mktemp("pml") / "root"
    (folder / "folder").mkdir(parents=True)
    (folder.parent / "outside.txt").write_text("secret")
    (folder / "a.txt").write_text("file a")
    (folder / "folder" / "b.txt").write_text("file b")
    (folder / "link.txt").symlink_to(folder.parent / "outside.txt")
    os.mkfifo(folder / "pipe")
    return folder


def said_by(nodes: tuple) -> str:
    inner = (getattr(node, "children", None) or getattr(node, "members", ()) for node in nodes)
    return "".join(getattr(node, "text", "") + said_by(within) for node, within in zip(nodes, inner, strict=True))


def read(document: str, root: Path) -> Schema | None:
    try:
        schema = Schema.from_text(document, root=root, source="document")
    except PMLError as error:
        refusal = error
    else:
        files = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        said = said_by(schema.children)
        assert len(said) <= len(document) + files * (1 + document.count("src"))
        assert not any(word in said and word not in document for word in ("secret", "root:"))
        return schema
    assert refusal.source == "document"
    assert refusal.line is None or 1 <= refusal.line <= document.count("\n") + document.count("\r") + 2
    return None


TOKENS = Tokens(tokenize, 0, (1,), "", lambda said: "".join(f"[{each['role']}]{each['content']}" for each in said))


def check(root: Path, document: str, prompt: str) -> None:
    schema = read(document, root)
    with suppress(PMLError):
        if schema is not None:
            name = next(iter(schema.modules), None)
            asked = schema.prompt("?") if name is None else schema.prompt(Import(name), "?")
            assert lay_out(SchemaLayout(schema, TOKENS), asked).token_ids
    travel = Schema.from_text(SEEDS[0])
    with suppress(PMLError):
        assert lay_out(SchemaLayout(travel, TOKENS), travel.parse_prompt(prompt, source="document")).token_ids


RELAXED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=500, suppress_health_check=RELAXED)
@given(documents, prompts)
@example('<schema ame="files"><odule name="a" src="a.txt"/></schema>', "")
def test_malformed_documents_are_read_or_refused(root: Path, document: str, prompt: str) -> None:
    check(root, document, prompt)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, suppress_health_check=RELAXED)
@given(documents, prompts)
def test_ten_thousand_malformed_documents(root: Path, document: str, prompt: str) -> None:
    check(root, document, prompt)


SOURCES = ("../outside.txt", "link.txt", "/etc/passwd", "pipe", "folder", "none.txt")
ATTACKS = [*SEEDS[2:4], *(f'<schema name="s"><module name="a" src="{src}"/></schema>' for src in SOURCES)]
ATTACKS += ["<a>" * 100_000, '<schema name="s">' + "<module name='m'>" * 100 + "</module>" * 100 + "</schema>"]


@pytest.mark.parametrize("document", ATTACKS)
def test_an_attack_is_refused(root: Path, document: str) -> None:
    with pytest.raises(PMLError):
        Schema.from_text(document, root=root, source="document")
