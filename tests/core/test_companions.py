"""What chunks are read behind: the most similar text that they may see, and never another document's by default."""

import math
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.companions import Companions
from cacheblend_rag.store import NodeRecord
from tests.families import tiny_model, tiny_tokenizer

MODEL = tiny_model("llama")
PASSAGES = files("cacheblend_rag").joinpath("passages.txt").read_text("utf-8").split("\n%\n")
texts = st.lists(st.sampled_from([f"t{number}" for number in range(1, 9)]), min_size=2, max_size=6).map(" ".join)
libraries = st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=4)


def nearest(own: Sequence[int], others: dict[str, tuple[int, ...]]) -> set[str]:
    """Return the ids of the texts that share most with a text by BM25 over distinct tokens, all those that are as near."""
    mean = sum(len(set(each)) for each in others.values()) / len(others)
    scores = dict.fromkeys(others, 0.0)
    for word in set(own):
        having = [id for id, text in others.items() if word in text]
        for id in having:
            weight = math.log(1 + (len(others) - len(having) + 0.5) / (len(having) + 0.5))
            scores[id] += weight / (0.25 + 0.75 * len(set(others[id])) / mean)
    allowed = {id: score for id, score in scores.items() if tuple(others[id]) != tuple(own)}
    return {id for id, score in allowed.items() if score > max(allowed.values()) - 1e-9}


@pytest.mark.parametrize("companions", ["own", "similar", "neutral"])
@given(library=libraries)
def test_a_chunk_is_read_behind_the_most_similar_one_that_it_may_see(companions: str, library: list[list[str]]) -> None:
    settings = engine_settings(companions=companions, separator=" ; ", self_check=False)
    with BlendEngine(MODEL, tiny_tokenizer(), **settings) as engine:
        ids: dict[str, list[str]] = {}
        chunks = []
        for document, pieces in enumerate(library):
            for number, text in enumerate(pieces):
                ids.setdefault(str(document), []).append(f"{document}-{number}")
                chunks.append(Chunk(text, f"{document}-{number}", document=str(document), start=100 * number))
        engine.add(chunks)
        records: dict[str, NodeRecord] = {each.id: each for each in engine.records(engine.ids()) if each is not None}
        tokens = {id: record.token_ids for id, record in records.items()}
        for document, members in ids.items():
            for number, id in enumerate(members):
                later = records[id].later
                assert later is not None
                # The passages have no word of this tokenizer: as none is nearer, they are the first two.
                unknown = engine.tokenizer.unk_token_id
                begin = sum(len(text.split()) + 1 for text in PASSAGES[:2])
                assert later.behind[:begin] == (unknown,) * begin
                seen = set(dict(later.seen))
                if companions == "neutral":
                    assert not seen and len(later.behind) == begin
                    continue
                before = set(members[:number])
                visible = tokens if companions == "similar" else {each: tokens[each] for each in members}
                wanted = nearest(tokens[id], visible)
                assert id not in seen and seen <= wanted | before
                if companions == "own":
                    assert seen <= set(ids[document])
                if wanted:
                    assert seen & wanted
                    shown = {tokens[each] for each in wanted}
                    assert any(later.behind[begin:][: len(text)] == text for text in shown)


@given(
    one=st.integers(0, len(PASSAGES) - 1),
    other=st.integers(0, len(PASSAGES) - 1),
    companions=st.sampled_from(["own", "neutral"]),
)
def test_the_passages_are_those_nearest_to_the_document(one: int, other: int, companions: str) -> None:
    """To the whole document, of which the chunk says nothing, or with "neutral" to the chunk."""
    assume(one != other)
    ids: dict[str, int] = {}

    def tokenize(text: str) -> tuple[int, ...]:
        return tuple(ids.setdefault(word, len(ids)) for word in text.split())

    chooser = Companions(companions, "n", (), None, tokenize, lambda: pytest.fail("no store is asked"))
    texts = [tokenize(PASSAGES[number]) for number in (one, other)]
    own = (-1, -2) if companions == "own" else texts[0] + texts[1]
    record, *others = (NodeRecord(str(n), "key", "hash", ids, (), "d") for n, ids in enumerate([own, *texts]))
    [later] = chooser.choose([record], {"d": [record, *others]})
    wanted = tuple(chain.from_iterable(tokenize(PASSAGES[number])[:256] for number in sorted((one, other))))
    assert later.behind[: len(wanted)] == wanted
