"""The online guard: it finds answers that reuse spoils, acts on them, and is in nobody's way."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments import Guard
from cacheblend_attachments.guard import distances
from cacheblend_lab.reference import load_model, load_tokenizer
from cacheblend_lab.reference.corpus import examples
from cacheblend_lab.reference.prompt import FORM
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import CacheBlendError, ConfigError
from tests.families import tiny_model, tiny_tokenizer, words

THREAD = "cacheblend-guard"


def tiny_engine(**changes: Any) -> BlendEngine:
    settings = engine_settings(**({"recompute_ratio": 0.0, "selector": "random", "preamble": ""} | changes))
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings)
    engine.add([Chunk(id=name, text=words(8, number)) for number, name in enumerate("abcd")])
    return engine


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with tiny_engine() as engine:
        yield engine


@pytest.fixture
def guard(engine: BlendEngine) -> Guard:
    return engine.attach(Guard(1.0))


def prompt(number: int = 0) -> BlendPrompt:
    return BlendPrompt(words(3, 50 + number), ["a", "b", "c"], words(4, 90 + number))


def guard_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def metric(engine: BlendEngine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(f"cacheblend_guard_{name}", labels)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    return load_model(), load_tokenizer()


@pytest.fixture(scope="module")
def pronouns() -> list[BlendPrompt]:
    """Questions whose answer stands in a chunk that says only "he" or "she"."""
    return [
        BlendPrompt(FORM.prefix(), [Chunk(text) for text in each.chunks], FORM.suffix(question.text), FORM.separator)
        for each in examples(40)
        for question in each.questions
        if question.kind == "pronoun"
    ]


@contextmanager
def guarded(reference: tuple[Any, Any], action: Any, limit: float = 0.01, window: int = 3) -> Iterator[Any]:
    with BlendEngine(*reference, **engine_settings(self_check=False, recompute_ratio=0.0)) as engine:
        yield engine, engine.attach(Guard(1.0, action=action, limit=limit, window=window))


def ask_until_it_acts(engine: BlendEngine, guard: Guard, prompts: list[BlendPrompt]) -> int:
    """Ask, each answer compared before the next question; return how many questions it took."""
    for number, each in enumerate(prompts, 1):
        engine.generate(each, 32)
        assert guard.wait(120)
        if guard.status().action is not None:
            return number
    raise AssertionError("the guard never acted")


def test_it_raises(reference: tuple[Any, Any], pronouns: list[BlendPrompt], caplog: pytest.LogCaptureFixture) -> None:
    with guarded(reference, "raise") as (engine, guard):
        asked = ask_until_it_acts(engine, guard, pronouns)
        status = guard.status()
        assert status.compared == status.sampled == asked >= 3
        assert 0 < status.differing <= asked
        assert (status.recompute_ratio, status.window) == (0.05, 0)
        assert status.action is not None and status.action.startswith("recompute_ratio raised from 0 to 0.05")
        report = engine.generate(pronouns[0], 2).report
        assert (report.recompute_ratio, report.guard, report.fallback_reason) == (0.05, status.action, None)
        assert metric(engine, "recompute_ratio") == 0.05
        assert metric(engine, "acted") == 1
        # Settings that a call brings itself are its own business.
        own = engine.generate(pronouns[0], 2, blend=engine.blend.replace()).report
        assert (own.recompute_ratio, own.guard) == (0.0, None)
        guard.reset()
        assert engine.generate(pronouns[0], 2).report.recompute_ratio == 0.0
    (warning,) = (record for record in caplog.records if record.name.endswith(".guard"))
    assert status.action in warning.getMessage()


def test_it_falls_back_to_full_prefill(reference: tuple[Any, Any], pronouns: list[BlendPrompt]) -> None:
    with guarded(reference, "full") as (engine, guard):
        ask_until_it_acts(engine, guard, pronouns)
        compared = guard.status().compared
        result = engine.generate(pronouns[0], 32)
        assert result.report.selector == "full"
        assert result.report.guard == result.report.fallback_reason == guard.status().action
        full = engine.generate(pronouns[0], 32, blend=engine.blend.replace(enabled=False))
        assert result.text == full.text
        assert guard.wait(120)
        assert guard.status().compared == compared
        assert metric(engine, "recompute_ratio") == 1
        assert engine.metrics.registry.get_sample_value("cacheblend_fallbacks_total") == 1


def test_it_reports(reference: tuple[Any, Any], pronouns: list[BlendPrompt], caplog: pytest.LogCaptureFixture) -> None:
    with guarded(reference, "report", limit=0.0, window=2) as (engine, guard):
        for each in pronouns[:5]:
            engine.generate(each, 32)
            assert guard.wait(120)
        status = guard.status()
        assert (status.compared, status.window, status.action, status.recompute_ratio) == (5, 2, None, 0.0)
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith(".guard")]
    assert 1 <= len(warnings) <= 2
    assert all(warning.startswith("guard: the last 2 compared answers differ") for warning in warnings)


def test_it_takes_part_while_it_is_attached(engine: BlendEngine) -> None:
    guard = Guard(1.0)

    def ask() -> tuple[int, float | None]:
        assert engine.generate(prompt(), 3).report.guard is None
        assert guard.wait(120)
        return guard.status().sampled, metric(engine, "pending")

    assert (ask(), guard_threads()) == ((0, None), [])
    assert engine.attach(guard) is guard
    assert ask() == (1, 0.0)
    guard.close()
    assert ask() == (1, None)
    assert not any(module._forward_hooks for module in engine.model.modules())
    for other, message in ((guard, "this Guard was attached before"), (object(), "is not an Attachment")):
        with pytest.raises(ConfigError, match=message):
            engine.attach(other)  # type: ignore[type-var]
    engine.close()
    with pytest.raises(ConfigError, match="this engine is closed"):
        engine.attach(Guard())


def test_an_attachment_has_answers_decoded_alone_and_tenants_get_another(engine: BlendEngine, guard: Guard) -> None:
    class Alone(Attachment):
        def alone_reason(self, run: Any) -> str:
            return "it looks at one answer"

    prompts, alone = [prompt(), prompt(1)], engine.attach(Alone())
    assert [each.report.alone_reason for each in engine.generate_many(prompts, 2)] == ["it looks at one answer"] * 2
    alone.close()
    assert [each.report.batch_size for each in engine.generate_many(prompts, 2)] == [2, 2]
    with engine.for_tenant("other") as other:
        other.generate(BlendPrompt("", [Chunk(words(8, 1))], words(4, 7)), 2)
        assert metric(other, "pending") is not None


def test_an_answer_whose_chunks_changed_is_not_compared(engine: BlendEngine, guard: Guard) -> None:
    with scheduler_of(engine.model):
        engine.generate_many([prompt(), prompt(1)], 2)
        engine.add([Chunk(id="b", text=words(9, 30))])
    assert guard.wait(120)
    # While the first waited for the model, it may have been in tokens already.
    assert 2 - guard.status().compared == guard.status().failed >= 1


def test_an_exact_blend_is_no_divergence(engine: BlendEngine, guard: Guard) -> None:
    # The only chunk stands right behind its preamble.
    engine.generate(BlendPrompt("", ["a"], words(4, 7)), 5)
    assert guard.wait(120)
    status = guard.status()
    assert (status.compared, status.differing, status.divergence) == (1, 0, 0.0)
    assert status.first_token_kl == pytest.approx(0, abs=1e-6)


def test_concurrent_queries_keep_their_answers() -> None:
    with tiny_engine() as guarded, tiny_engine() as plain:
        guard = guarded.attach(Guard(1.0))
        wanted = [plain.generate(prompt(number), 6).token_ids for number in range(16)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: guarded.generate(prompt(number), 6).token_ids, range(16)))
        assert found == wanted
        assert guard.wait(120)
        status = guard.status()
        assert (status.sampled, status.failed, status.pending) == (16, 0, 0)
        assert status.compared + status.dropped == 16
        assert metric(guarded, "samples_total", outcome="compared") == status.compared > 0
        assert metric(guarded, "divergence") == status.divergence


def test_too_many_samples_are_dropped_and_closing_does_not_wait_for_them(engine: BlendEngine, guard: Guard) -> None:
    # Whoever has the model may take it again, and the guard waits.
    with scheduler_of(engine.model):
        for number in range(11):
            engine.generate(prompt(number), 2)
        status = guard.status()
        assert (status.sampled, status.pending, status.dropped, status.compared) == (11, 8, 3, 0)
        assert not guard.wait(0)
        engine.close()
        assert guard.status().dropped == 11
    for thread in guard_threads():
        thread.join(120)
    assert guard.status().compared == 0
    assert guard.wait(0)


def test_it_gives_way_to_a_prompt(engine: BlendEngine, guard: Guard) -> None:
    begun, go_on = threading.Event(), threading.Event()
    attempts = []

    def hold(*_: Any) -> None:
        if threading.current_thread().name == THREAD:
            attempts.append(scheduler_of(engine.model).wanted)
            begun.set()
            assert go_on.wait(120)

    engine.model.model.layers[1].register_forward_pre_hook(hold)
    engine.generate(prompt(), 2)
    assert begun.wait(120)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, prompt(1), 2, blend=engine.blend.replace())
        while not scheduler_of(engine.model).wanted:
            pass
        go_on.set()
        assert answer.result(120).token_ids
    assert guard.wait(120)
    # The first attempt got no further than the next layer: one more than the two forwards of the whole comparison.
    assert len(attempts) == 3
    assert guard.status().compared == 1


def test_streams_are_compared_and_cancelled_ones_are_not(engine: BlendEngine, guard: Guard) -> None:
    stream = engine.stream(prompt(), 4)
    assert "".join(stream) and stream.result()
    assert guard.wait(120)
    assert guard.status().compared == 1
    with scheduler_of(engine.model):
        cancelled = engine.stream(prompt(1), 4)
        cancelled.close()
    with pytest.raises(CacheBlendError, match="cancelled before it began"):
        cancelled.result()
    assert guard.wait(120)
    assert guard.status().sampled == 1


def test_of_answers_drawn_at_random_the_first_token_is_compared(engine: BlendEngine, guard: Guard) -> None:
    engine.generate(prompt(), 4, do_sample=True)
    assert guard.wait(120)
    status = guard.status()
    assert (status.compared, status.differing) == (1, 0)
    assert status.divergence is not None and 0 < status.divergence <= 1


def test_a_failed_comparison_is_counted(engine: BlendEngine, guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        if threading.current_thread().name == THREAD:
            raise RuntimeError("secret words")

    engine.model.model.layers[2].register_forward_pre_hook(fail)
    engine.generate(prompt(), 2)
    assert guard.wait(120)
    assert guard.status().failed == 1
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text
    assert engine.generate(prompt(1), 2).token_ids


def test_it_raises_up_to_full_prefill() -> None:
    def orders(**changes: Any) -> list[str]:
        with tiny_engine(**changes) as engine:
            guard, found = engine.attach(Guard(action="raise")), []
            while guard.order().blend.enabled:
                guard._adopt(guard._next("why"))
                found.append(str(guard.status().action))
            return found

    assert orders(recompute_ratio=0.5) == ["recompute_ratio raised from 0.5 to 0.75: why", "full prefill: why"]
    assert orders(selector="none") == ["full prefill: why"]


def test_an_interpreter_that_ends_does_not_wait_for_comparisons() -> None:
    script = """
import sys, threading, time; sys.path.insert(0, "integrations/attachments/tests")
from test_guard import Guard, prompt, tiny_engine
engine = tiny_engine()
guard = engine.attach(Guard(1.0))
slow = lambda *_: time.sleep(1.0 if threading.current_thread().name == "cacheblend-guard" else 0)
engine.model.model.layers[1].register_forward_pre_hook(slow)
engine.generate(prompt(), 400, min_new_tokens=400)
print(guard.status().pending)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


@pytest.mark.parametrize("values", [{"share": 1.5}, {"action": "pray"}, {"limit": float("nan")}, {"window": 0}])
def test_settings_without_meaning_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Guard(**values)


@settings(max_examples=40)
@given(st.integers(2, 700), st.integers(0, 2**31), st.floats(0.1, 20), st.sampled_from([torch.float32, torch.bfloat16]))
def test_distances_of_distributions(vocabulary: int, seed: int, scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = ((scale * torch.randn(vocabulary, generator=generator)).to(dtype) for _ in range(2))
    p, q = (logits.double().softmax(-1) for logits in (one, other))
    kl, distance = distances(one, other)
    whole_kl, whole_distance = float((p * (p.log() - q.log())).sum()), float((p - q).abs().sum() / 2)
    assert 0 <= kl <= whole_kl + 1e-6
    assert 0 <= distance <= whole_distance + 1e-9
    if vocabulary <= 256 and float(q.min()) > 1e-11 and float(p.min()) > 1e-11:
        assert kl == pytest.approx(whole_kl, abs=1e-6)
        assert distance == pytest.approx(whole_distance, abs=1e-9)
    assert distances(one, one) == pytest.approx((0, 0), abs=1e-9)


def test_a_token_that_is_ruled_out_leaves_the_divergence_finite() -> None:
    one, other = torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, -torch.inf])
    assert 0 < distances(one, other)[0] < 10
    assert distances(other, one)[0] == pytest.approx(torch.tensor(4 / 3).log().item())
