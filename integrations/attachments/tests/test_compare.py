"""Every Nth answer against full prefill: what it counts is what asking twice finds, and it is in nobody's way."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cacheblend_attachments import CompareAnswers
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.backend import scheduler_of
from cacheblend_rag.errors import ConfigError
from tests.families import tiny_model, tiny_tokenizer, words

THREAD = "cacheblend-compare"


def tiny_engine() -> BlendEngine:
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(recompute_ratio=0.0, preamble=""))
    engine.add([Chunk(id=name, text=words(8, number)) for number, name in enumerate("abcd")])
    return engine


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with tiny_engine() as engine:
        yield engine


@pytest.fixture
def compare(engine: BlendEngine) -> CompareAnswers:
    return engine.attach(CompareAnswers(1))


def prompt(number: int = 0) -> BlendPrompt:
    return BlendPrompt(words(3, 50 + number), ["a", "b", "c"], words(4, 90 + number))


def metric(engine: BlendEngine, outcome: str) -> float | None:
    return engine.metrics.registry.get_sample_value("cacheblend_compared_answers_total", {"outcome": outcome})


def f1_of(one: str, other: str) -> float:
    """The naive way: what of each other's words is taken away, one after the other."""
    left, shared = other.split(), 0
    for word in one.split():
        if word in left:
            left.remove(word)
            shared += 1
    return 2 * shared / max(len(one.split()) + len(other.split()), 1)


def test_it_finds_what_asking_twice_finds_and_logs_no_text(
    engine: BlendEngine, compare: CompareAnswers, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = []
    for number in range(6):
        blended = engine.generate(prompt(number), 8).text
        assert compare.wait(120)
        pairs.append((blended, engine.generate(prompt(number), 8, blend=BlendConfig(enabled=False)).text))
    # Right behind its preamble a chunk is exact.
    assert engine.generate(BlendPrompt("", ["a"], words(4, 7)), 5).text
    assert compare.wait(120)
    status = compare.status()
    different = sum(one != other for one, other in pairs)
    assert 0 < different <= 6
    assert (status.same, status.different, status.dropped, status.failed) == (7 - different, different, 0, 0)
    assert status.f1 == pytest.approx((1 + sum(f1_of(*pair) for pair in pairs)) / 7)
    assert (metric(engine, "same"), metric(engine, "different")) == (status.same, status.different)
    total = engine.metrics.registry.get_sample_value("cacheblend_compared_f1_total")
    assert total == pytest.approx(7 * status.f1)
    assert caplog.records and not any(word in caplog.text for pair in pairs for word in pair if word)


def test_every_third_answer_that_can_be_compared_streams_among_them(engine: BlendEngine) -> None:
    compare = engine.attach(CompareAnswers(3))
    for number in range(7):
        assert "".join(engine.stream(prompt(number), 2))
        # None of these counts.
        engine.generate(prompt(number), 2, do_sample=True)
        engine.generate(prompt(number), 2, blend=BlendConfig(enabled=False))
        engine.generate(prompt(number), 2, logits_processor=[lambda ids, scores: scores])
        with scheduler_of(engine.model):
            engine.stream(prompt(1), 4).close()
        assert compare.wait(120)
    status = compare.status()
    assert status.same + status.different == 2


def test_it_takes_part_while_it_is_attached_and_tenants_get_another(engine: BlendEngine) -> None:
    compare = engine.attach(CompareAnswers(1))
    with engine.for_tenant("other") as other:
        other.generate(BlendPrompt("", [Chunk(words(8, 1))], words(4, 7)), 2)
        assert metric(other, "same") is not None
    assert compare.status().f1 is None
    for _ in range(2):
        compare.close()
    engine.generate(prompt(), 2)
    assert (metric(engine, "same"), compare.wait(0)) == (None, True)
    for again in (compare, object()):
        with pytest.raises(ConfigError):
            engine.attach(again)  # type: ignore[type-var]
    engine.attach(CompareAnswers())
    assert metric(engine, "same") == 0


def test_one_waits_at_a_time_until_the_engine_is_closed(engine: BlendEngine, compare: CompareAnswers) -> None:
    # Whoever has the model may take it again, and the comparison waits.
    with scheduler_of(engine.model):
        engine.generate_many([prompt(), prompt(1), prompt(2)], 2)
        engine.add([Chunk(id="b", text=words(9, 30))])
        assert not compare.wait(0)
    assert compare.wait(120)
    status = compare.status()
    # While it waited for the model, it may have been in tokens already.
    assert (status.dropped, status.same + status.different + status.failed) == (2, 1)
    with scheduler_of(engine.model):
        engine.generate(prompt(), 2)
        engine.close()
    assert compare.wait(120)
    assert compare.status().dropped == 3


def test_it_gives_way_to_a_prompt(engine: BlendEngine, compare: CompareAnswers) -> None:
    begun, go_on = threading.Event(), threading.Event()
    attempts = []

    def hold(*_: Any) -> None:
        if threading.current_thread().name == THREAD:
            attempts.append(bool(scheduler_of(engine.model).queue))
            begun.set()
            assert go_on.wait(120)

    engine.model.model.layers[1].register_forward_pre_hook(hold)
    engine.generate(prompt(), 2)
    assert begun.wait(120)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, prompt(1), 2, blend=BlendConfig(enabled=False))
        while not scheduler_of(engine.model).queue:
            pass
        go_on.set()
        assert answer.result(120).token_ids
    assert compare.wait(120)
    # The first attempt got no further than the next layer: one more than the two forwards of the whole comparison.
    assert len(attempts) == 3
    status = compare.status()
    assert (status.same + status.different, status.dropped) == (1, 0)


def test_a_failed_comparison_is_counted_and_quotes_nothing(
    engine: BlendEngine, compare: CompareAnswers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_aside", lambda request: 1 / request.options["secret"])
    engine.generate(prompt(), 2)
    assert compare.wait(120)
    assert compare.status().failed == 1
    assert caplog.records and "secret" not in caplog.text


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_a_number_without_meaning_is_refused(every: Any) -> None:
    with pytest.raises(ConfigError, match="every"):
        CompareAnswers(every)
