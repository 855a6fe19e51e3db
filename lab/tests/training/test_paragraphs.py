"""Contexts of paragraphs: what they look like, what a reader can know of retrieved chunks, and what is asked."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from cacheblend_lab.reference.corpus import Document
from cacheblend_lab.reference.prompt import value_of
from cacheblend_lab.training.corpus import NOTES, Example, eval_examples, make_example, retrieved_order
from cacheblend_lab.training.fillers import filler_parts
from cacheblend_lab.training.paragraphs import ORDERS, Paragraphs, build_paragraphs
from cacheblend_lab.training.questions import KINDS, NOT_STATED, ask
from cacheblend_lab.training.sight import Sight, look
from cacheblend_lab.training.templates import ATTRIBUTES
from cacheblend_lab.training.tokenizer import build_tokenizer
from cacheblend_lab.training.vocabulary import HEADS_AND_TAILS, PLAIN_PAIRS
from cacheblend_lab.training.world import Fact, World

TOKENIZER = build_tokenizer()
STYLE = Paragraphs()
# What any two English sentences share.
SHARED = set("a an s v is the of in with for by into at as to after".split())
NAME = re.compile(r"[A-Z]\w+ [A-Z]\w+|[A-Z][a-z]{4,}")
PRONOUNS = re.compile(r"\b(?:she|he|it)\b", re.IGNORECASE)


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [build_paragraphs(random.Random(number), STYLE, "train") for number in range(60)]


@pytest.fixture(scope="module", params=ORDERS)
def held_out(request: pytest.FixtureRequest) -> list[Example]:
    return eval_examples(400, seed=3, min_chunks=1, style=STYLE, per_context=16, order=request.param)


@pytest.fixture(scope="module", params=["notes", *ORDERS])
def asked(request: pytest.FixtureRequest) -> list[Example]:
    if request.param == "notes":
        return eval_examples(600, seed=3, style=NOTES)
    return eval_examples(400, seed=3, min_chunks=1, style=STYLE, per_context=16, order=request.param)


def test_fillers_have_no_word_of_a_value_a_name_or_a_fact() -> None:
    taken = {word for parts in PLAIN_PAIRS.values() for part in parts for word in part}
    taken |= {tail for _, tails in HEADS_AND_TAILS.values() for tail in tails}
    stated = {word for attribute in ATTRIBUTES.values() for text in attribute.statements for word in words(text)}
    used = {word for part in filler_parts() for word in words(part)}
    assert not used & (taken | stated) - SHARED
    assert not PRONOUNS.search(" ".join(filler_parts()))
    written = {f" {word}" for part in filler_parts() for word in part.split()}
    assert all(len(TOKENIZER(word, add_special_tokens=False)["input_ids"]) == 1 for word in written)


def test_chunks_have_the_length_that_is_asked_for(held_out: list[Example]) -> None:
    lengths = [len(ids) for e in held_out for ids in TOKENIZER(list(e.chunks), add_special_tokens=False)["input_ids"]]
    assert min(lengths) >= 50 and max(lengths) <= 160
    assert sum(60 <= length <= 150 for length in lengths) > 0.98 * len(lengths)
    assert all(10 <= len(example.chunks) <= 20 for example in held_out)
    prompts = [len(TOKENIZER("\n".join(e.chunks), add_special_tokens=False)["input_ids"]) for e in held_out]
    assert min(prompts) > 800 and max(prompts) < 2500


def test_a_document_names_its_subject_first_and_states_few_facts_a_chunk(worlds: list[World]) -> None:
    later = named = 0
    for world in worlds:
        titles = [document.title for document in world.documents]
        start = 0
        for document in world.documents:
            for place, text in enumerate(document.chunks):
                facts = [fact for fact in world.facts if fact.chunk == start + place]
                assert 1 <= len(facts) <= 3
                assert {fact.subject for fact in facts} == {document.title}
                assert all(fact.value in text for fact in facts)
                assert {fact.names_subject for fact in facts} == {document.title in text}
                # Nobody else is named but as the value of a fact.
                assert all(
                    title == document.title or title in {f.value for f in facts} for title in titles if title in text
                )
                later += place > 0
                named += place > 0 and facts[0].names_subject
            assert document.title in document.chunks[0]
            assert 1 <= len(document.chunks) <= 5
            start += len(document.chunks)
    assert 0.2 < named / later < 0.4


def small_world() -> World:
    """Ada (three chunks: born, lives, pet), Bea (lives, neighbour) and a company (base, goods); the first of each names it."""
    facts = (
        Fact("Ada", "born", "Ashford", 0, True),
        Fact("Ada", "lives", "Oakport", 1, False),
        Fact("Ada", "pet", "grey goat", 2, False),
        Fact("Bea", "lives", "Elmbury", 3, True),
        Fact("Bea", "neighbour", "Cid", 4, False),
        Fact("Vectron", "base", "Ipsdale", 5, True),
        Fact("Vectron", "goods", "metal lamps", 6, False),
    )
    sizes = {"Ada": 3, "Bea": 2, "Vectron": 2}
    texts = iter(f"{fact.attribute} {fact.value}" for fact in facts)
    return World(tuple(Document(name, tuple(next(texts) for _ in range(size))) for name, size in sizes.items()), facts)


def known(sight: Sight) -> dict[tuple[str, str], tuple[int, int]]:
    return {(fact.subject, fact.attribute): (fact.chunk, sight.naming[fact.chunk]) for fact in sight.known}


def test_relations_hold_both_ways() -> None:
    sight = look(small_world(), range(7))
    assert not sight.is_absent("Cid", "neighbour")
    assert sight.is_absent("Cid", "cousin") and sight.is_absent("Ada", "neighbour")


def test_what_a_chunk_without_its_subject_states_is_neither_known_nor_absent() -> None:
    # "She keeps a grey goat." first of all; then behind Bea, of whom a reader takes it to speak.
    sight = look(small_world(), (2, 3))
    assert known(sight) == {("Bea", "lives"): (1, 1)}
    assert not any(sight.is_absent(name, "pet") for name in ("Ada", "Bea", "Dan"))
    # "She lives in Oakport." behind Bea, who lives in Elmbury: that is no longer plain. Of Ada it is not known either.
    sight = look(small_world(), (3, 1, 0))
    assert known(sight) == {("Ada", "born"): (2, 2)}
    assert not sight.is_absent("Ada", "lives")
    # Behind Ada and a chunk of Bea, both untold chunks are taken to speak of Ada.
    sight = look(small_world(), (0, 4, 1))
    assert known(sight) == {("Ada", "born"): (0, 0)}
    assert sight.untold == {"neighbour", "lives"}


def told(world: World, order: list[int], place: int) -> int | None:
    """Return where the chunk at a place is told whom it is about: walked back, as the words say, chunk by chunk."""
    about = {fact.chunk: fact for fact in world.facts}
    subject = about[order[place]].subject
    while place >= 0 and about[order[place]].subject == subject:
        if about[order[place]].names_subject:
            return place
        place -= 1
    return None


def test_known_and_absent_agree_with_a_plain_reading(worlds: list[World]) -> None:
    counts = Counter[str]()
    for number, world in enumerate(worlds):
        order = retrieved_order(random.Random(number), world)
        sight = look(world, order)
        tellers = [told(world, order, place) for place in range(len(order))]
        assert sight.chunks == tuple(world.chunks[chunk] for chunk in order)
        assert sight.naming == {place: teller for place, teller in enumerate(tellers) if teller is not None}
        in_prompt = [fact for fact in world.facts if fact.chunk in order]
        untold = [fact for fact in in_prompt if tellers[order.index(fact.chunk)] is None]
        for fact in in_prompt:
            seen = replace(fact, chunk=order.index(fact.chunk)) in sight.known
            assert not (seen and fact in untold)
            counts["known" if seen else "untold" if fact in untold else "misread"] += 1
            assert not sight.is_absent(fact.subject, fact.attribute)
        for fact in untold:
            assert not sight.is_absent("somebody", fact.attribute)
    assert min(counts.values()) > 20
    assert counts["misread"] < counts["untold"] < counts["known"]


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


def test_what_is_not_said_is_said_of_nobody() -> None:
    rng = random.Random(1)
    style = Paragraphs(kinds=("unanswerable",))
    asked = 0
    for _ in range(20):
        world = build_paragraphs(rng, style, "train")
        sight = look(world, range(len(world.chunks)))
        for question in ask(rng, sight, "train", style):
            kind = next(name for name, each in ATTRIBUTES.items() if _asks(question.text, [*sum(each.questions, ())]))
            assert question.sentence.endswith(f": {NOT_STATED}")
            assert value_of(question.sentence) == question.answer
            assert kind not in {fact.attribute for fact in world.facts}
            asked += 1
    assert asked > 20


def _asks(text: str, cores: list[str]) -> bool:
    return any(all(part in text for part in core.split("{S}")) for core in cores)


def test_a_retrieved_context_lacks_chunks_and_has_no_documents(held_out: list[Example]) -> None:
    whole = [example for example in held_out if example.documents]
    assert len(whole) in (0, len(held_out))
    for example in whole:
        assert example.chunks == tuple(chunk for document in example.documents for chunk in document.chunks)


def test_examples_follow_from_the_seed() -> None:
    for order in ORDERS:
        first, again = (make_example(random.Random("train"), STYLE, "train", 20, order) for _ in range(2))
        assert first == again
