"""The generated corpus: determinism, disjoint halves, and questions that can be answered from their support."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.reference.corpus import CORPUS_FILE
from cacheblend_lab.reference.prompt import BOS, FORMATS, chat, value_of
from cacheblend_lab.training.corpus import NOTES, Example, demo_corpus, eval_examples, make_example
from cacheblend_lab.training.paragraphs import ORDERS, Paragraphs
from cacheblend_lab.training.questions import KINDS, NOT_STATED
from cacheblend_lab.training.templates import ATTRIBUTES, COMPARISONS, question_templates, statement_templates
from cacheblend_lab.training.tokenizer import build_tokenizer
from cacheblend_lab.training.vocabulary import PLAIN_PAIRS, Maker
from cacheblend_lab.training.world import Style

NAMED_KINDS = ("person", "town", "firm", *PLAIN_PAIRS)


def test_examples_follow_from_the_seed() -> None:
    assert eval_examples(40, seed=5, style=NOTES) == eval_examples(40, seed=5, style=NOTES)
    assert eval_examples(40, seed=5, style=NOTES) != eval_examples(40, seed=6, style=NOTES)
    first, again = (make_example(random.Random("train"), Style(), "train", 10) for _ in range(2))
    assert first == again
    assert CORPUS_FILE.read_text(encoding="utf-8") == demo_corpus()


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_values_of_the_two_halves_are_disjoint(kind: str) -> None:
    seen = {split: {Maker(random.Random(i), split).value(kind) for i in range(3000)} for split in ("train", "held_out")}
    assert not seen["train"] & seen["held_out"]
    assert len(seen["held_out"]) > 20


def test_templates_of_the_two_halves_are_disjoint() -> None:
    for name in ATTRIBUTES:
        assert set(statement_templates(name, "held_out")).isdisjoint(statement_templates(name, "train"))
    for asked in (*ATTRIBUTES.values(), *COMPARISONS):
        train, held_out = (question_templates(asked.questions, split) for split in ("train", "held_out"))
        assert held_out and set(held_out).isdisjoint(train)


TOKENIZER = build_tokenizer()
LINES = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), min_size=1, max_size=5
)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


@settings(max_examples=200)
@given(LINES)
def test_pieces_cut_at_line_breaks_equal_the_whole(lines: list[str]) -> None:
    whole = ids("\n".join(lines))
    before = [token for number, line in enumerate(lines) for token in ids(line if number == 0 else "\n" + line)]
    after = [token for number, line in enumerate(lines) for token in ids(line + "\n" * (number + 1 < len(lines)))]
    assert whole == before == after


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_one_bos_and_safe_borders(name: str) -> None:
    form = FORMATS[name]
    chunks, question = ["Marta Harsen lives in Ashford.", "She keeps a grey goat."], "Where does Marta Harsen live?"
    rendered = form.render(chunks, question)
    pieces = [form.prefix(), chunks[0], form.separator, chunks[1], form.suffix(question)]
    assert ids(rendered) == [token for piece in pieces for token in ids(piece)]
    assert ids(rendered).count(TOKENIZER.bos_token_id) == 1
    assert ids(rendered)[0] == TOKENIZER.bos_token_id


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_formats_are_what_the_chat_template_renders(system: str | None) -> None:
    inner = FORMATS["llama_index"]
    messages = [{"role": "user", "content": inner.render(["A.", "B."], "C?").removeprefix(BOS)}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat(inner, system).render(["A.", "B."], "C?")
    assert rendered.count(BOS) == 1


STYLE = Paragraphs()
NAME = re.compile(r"[A-Z]\w+ [A-Z]\w+|[A-Z][a-z]{4,}")


@pytest.fixture(scope="module", params=["notes", *ORDERS])
def asked(request: pytest.FixtureRequest) -> list[Example]:
    if request.param == "notes":
        return eval_examples(600, seed=3, style=NOTES)
    return eval_examples(400, seed=3, min_chunks=1, style=STYLE, per_context=16, order=request.param)


def test_every_kind_is_asked_and_its_answer_stands_where_it_says(asked: list[Example]) -> None:
    kinds = Counter(question.kind for example in asked for question in example.questions)
    assert set(kinds) in (set(KINDS), set(NOTES.kinds))
    assert min(kinds.values()) > 20
    for example in asked:
        for question in example.questions:
            assert value_of(question.sentence) == question.answer
            if question.kind == "unanswerable":
                assert question.sentence.endswith(f": {NOT_STATED}")
                assert (question.support, question.source) == ((), -1)
                continue
            assert question.source in question.support
            if question.kind != "comparison":
                assert question.answer in example.chunks[question.source]
            if question.kind == "pronoun":
                naming, fact = question.support
                subject = next(name for name in NAME.findall(question.sentence) if name in question.text)
                assert subject in example.chunks[naming]
                assert subject not in example.chunks[fact]
            if question.kind == "two_hop":
                # Its bridge is not named.
                assert len(NAME.findall(question.text.partition(" ")[2])) == 1 and len(question.support) >= 2
