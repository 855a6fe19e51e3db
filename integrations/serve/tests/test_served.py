"""What a server's engine does, beside the engine itself: names, prompts and answers are the same."""

import asyncio
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, MinNewTokensLengthLogitsProcessor

from cacheblend_pml import Schemas
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, FixedText, errors
from cacheblend_rag.chat.answer import Deadline, Ending
from cacheblend_rag.chat.grammar import Guide
from cacheblend_rag.engine import ChunkCollection, Engine
from cacheblend_rag.lexer import lexer_of
from cacheblend_serve.auth import KeyFile, Owner
from cacheblend_serve.client.engine import ServedEngine
from integrations.serve.tests.conftest import Serve, engine_of, serving
from integrations.serve.tests.test_answers import ask, events
from tests.engines import documents_of
from tests.thinking import Dictation

PIECE = partial(Chunk, document="mara")
STORY = [
    PIECE("Mara Lind was born in Oslo and moved north.\n", "born", start=0),
    PIECE("She works at the harbour as a rope maker.\n", "works", start=44),
    Chunk("A striped goat called Pim lives there too.\n", "goat"),
]
HEAD = FixedText("Answer the question from the context only.\n\n")
PROMPT = BlendPrompt(HEAD, ["works", "goat", Chunk("Nobody else is there.\n")], "\nQuestion: Who works?")
PROMPT_OF_TEXT = BlendPrompt(segments=["Is it so?"])
TOKENS = 12


def test_answers_are_those_of_the_engine(engine: BlendEngine, served: ServedEngine) -> None:
    served.add(STORY)
    expected = engine.generate(PROMPT, TOKENS)
    answer = served.generate(PROMPT, TOKENS)
    assert answer.text == expected.text
    assert (answer.finish_reason, answer.report.output_tokens) == ("length", TOKENS)
    assert [chunk.id for chunk in answer.report.chunks] == ["works", "goat", None]
    assert answer.report.hits >= 2
    stream = served.stream(PROMPT, TOKENS)
    assert "".join(stream) == expected.text == stream.result().text
    others = [BlendPrompt(HEAD, ["goat"], f"\nQuestion: {number}?") for number in range(4)]
    texts = [engine.generate(other, TOKENS).text for other in others]
    assert [each.text for each in served.generate_many(others, TOKENS)] == texts
    assert [each.text for each in asyncio.run(served.agenerate_many(others, TOKENS))] == texts


def test_settings_of_a_call_reach_the_engine(engine: BlendEngine, served: ServedEngine) -> None:
    served.add(STORY)
    with pytest.raises(errors.ConfigError, match="enabled"):
        served.generate(PROMPT, TOKENS, blend=BlendConfig(enabled=False))
    ratio = served.check_blend(BlendConfig(recompute_ratio=0.5))
    assert ratio.recompute_ratio == 0.5
    assert served.generate(PROMPT, TOKENS, blend=ratio).text == engine.generate(PROMPT, TOKENS, blend=ratio).text
    drawn = served.generate(PROMPT, TOKENS, do_sample=True, temperature=2.0, top_k=3, top_p=0.9)
    assert drawn.report.output_tokens == TOKENS
    greedy = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
    assert served.generate(PROMPT, TOKENS, **greedy).text == engine.generate(PROMPT, TOKENS).text


def test_stop_strings_and_a_grammar_hold_an_answer(engine: BlendEngine, served: ServedEngine) -> None:
    served.add(STORY)
    whole = engine.generate(PROMPT, 24).text
    stop = whole[len(whole) // 2 :][:3]
    ending = Ending((stop,))
    answer = ending.read(served.generate(PROMPT, 24, stopping_criteria=ending.criteria(served.tokenizer)))
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert served.generate(PROMPT, 24, stop_strings=[stop]).text == answer.text
    guide = Guide(served, 'start: "yes" | "no"')
    assert served.generate(PROMPT_OF_TEXT, 8, logits_processor=[guide]).text in ("yes", "no")


def test_names_are_those_of_the_engine(
    engine: BlendEngine, served: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that both chunks and ids need several requests.
    monkeypatch.setattr("cacheblend_serve.client.engine._BATCH", 2)
    monkeypatch.setattr("cacheblend_serve.client.engine._CHUNKS", 2)
    steps: list[tuple[int, int]] = []
    result = served.add(STORY, progress=lambda done, total: steps.append((done, total)))
    assert (result.encoded, result.named, result.unchanged) == (3, 3, 0)
    assert steps == sorted(steps) and steps[-1] == (3, 3)
    assert served.add(STORY).unchanged == 3
    asked = ["works", "nobody", "goat"]
    told = [
        (
            sorted(library.ids()),
            library.records(asked),
            documents_of(library, asked),
            library.document("mara"),
            library.document("nobody's"),
            library.prompt_layout(PROMPT).token_ids,
            [(span.start, span.stop, span.position) for span in library.prompt_layout(PROMPT).chunks],
            library.changes(),
            library.namespace,
            library.window,
            library.config.companions,
        )
        for library in (engine, served)
    ]
    assert told[0] == told[1]
    served.flush()
    served.prefetch(["goat"])
    assert isinstance(served, Engine) and isinstance(engine, Engine)
    assert (served.model_name, served.end_ids, served.blend) == (engine.model_name, engine.end_ids, engine.blend)


def test_what_is_deleted_is_gone(engine: BlendEngine, served: ServedEngine) -> None:
    job = served.add(STORY, background=True)
    assert (job.result(60).named, job.progress) == (3, (3, 3))
    shelf = ChunkCollection(served, lambda ids: set())
    assert (sorted(served.ids()), sorted(served.ids(within="mar"))) == (["born", "goat", "works"], ["born", "works"])
    # What a vector store loses behind our back is not noticed at a server.
    assert shelf.sync(served.ids()) == 0
    served.add([Chunk("Later.", "later")])
    assert served.delete(["goat"]) == 1
    assert shelf.sync(served.document("mara"), deleted=True) == 2
    assert engine.ids() == ["later"]
    assert (served.sync(["later"]), served.sync([])) == (0, 1)


def test_chunks_that_cannot_be_served_are_named(engine: BlendEngine, served: ServedEngine) -> None:
    refused: list[str | None] = []
    # Some end a line for some readers of lines, and half of a character is none in JSON.
    long = Chunk("one\u2028two\u0085three\x0b " + "word " * 3000, "long\u2028\u2029name")
    half = Chunk("Half of one: \ud83d", "half")
    result = served.add([*STORY, long, half], on_refused=lambda chunk, error: refused.append(chunk.id))
    assert result.named == len(engine.ids()) == 3
    assert sorted(map(str, refused)) == ["half", long.id]
    with pytest.raises(errors.PromptError, match="tokens"):
        served.add([long])


def test_a_busy_server_is_asked_for_as_long_as_the_answer_may_take(engine: BlendEngine) -> None:
    with serving(engine, requests=1) as address, ServedEngine(address) as served, ServedEngine(address) as other:
        stream = served.stream(BlendPrompt(segments=["Number:"]), 1500)
        next(stream)
        started, ending = time.monotonic(), Ending((), Deadline(0.5))
        with pytest.raises(errors.BackendError, match=r"busy|at once|requests"):
            other.generate(PROMPT_OF_TEXT, 4, stopping_criteria=ending.criteria(other.tokenizer))
        assert time.monotonic() - started < 20
        stream.close()


def test_what_only_an_engine_here_has_is_said(served: ServedEngine) -> None:
    with pytest.raises(AttributeError, match="attach"):
        served.attach()
    with pytest.raises(errors.ConfigError, match="engine"):
        Schemas(served)
    for refused in (
        partial(served.add, STORY, whole=True),
        partial(served.estimate, STORY),
        partial(served.generate, BlendPrompt(segments=["a", "b"], positions=[0, 5]), 4),
        partial(served.generate, BlendPrompt(segments=["a"], skip_unknown=True), 4),
        partial(served.generate, PROMPT_OF_TEXT, 4, wait_s=1),
        partial(served.generate, PROMPT_OF_TEXT, 4, do_sample=True),
        partial(served.generate, PROMPT_OF_TEXT, 4, num_beams=4),
        partial(served.generate, PROMPT_OF_TEXT, 4, logits_processor=[MinNewTokensLengthLogitsProcessor(1, 4, [0])]),
        partial(served.generate, PROMPT_OF_TEXT, 4, stopping_criteria=[object()]),
    ):
        with pytest.raises(errors.ConfigError):
            refused()


def test_errors_are_the_engines(served: ServedEngine) -> None:
    with pytest.raises(errors.UnknownChunkError, match="nobody"):
        served.generate(BlendPrompt("", ["nobody"], "?"), 4)
    with pytest.raises(errors.UnknownChunkError, match="nobody"):
        list(served.stream(BlendPrompt("", ["nobody"], "?"), 4))
    with pytest.raises(errors.PromptTooLongError, match="tokens"):
        served.generate(BlendPrompt(segments=["word " * 3000]), 4)
    for half in (BlendPrompt(segments=["half \ud83d"]), BlendPrompt("", [Chunk("half \ud83d")], "?")):
        with pytest.raises(errors.PromptError):
            served.generate(half, 4)
    ending = Ending((), Deadline(0.05))
    with pytest.raises(errors.AnswerTimeoutError):
        served.generate(PROMPT_OF_TEXT, 500, stopping_criteria=ending.criteria(served.tokenizer))


def written(engine: BlendEngine) -> float:
    return engine.metrics.registry.get_sample_value("cacheblend_output_tokens_total") or 0.0


def test_who_closes_a_stream_ends_the_answer(engine: BlendEngine, served: ServedEngine) -> None:
    before = written(engine)
    stream = served.stream(PROMPT_OF_TEXT, 900)
    next(stream)
    stream.close()
    with pytest.raises(errors.CacheBlendError, match="cut off"):
        stream.result()
    unwanted = threading.Event()
    unwanted.set()
    with pytest.raises(errors.CacheBlendError, match="cut off"):
        served.generate_many([PROMPT_OF_TEXT], 900, stop=unwanted)
    # Its turn comes when theirs are over.
    served.generate(PROMPT_OF_TEXT, 1)
    assert written(engine) - before < 900


def test_a_key_is_its_tenants(tiny: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = {name: file.add(Owner(name, name)) for name in ("left", "right")}
    with engine_of(tiny) as engine, serving(engine, keys=tmp_path / "keys.json") as address:
        with pytest.raises(errors.ConfigError, match="CACHEBLEND_SERVER_KEY"):
            ServedEngine(address)
        monkeypatch.setenv("CACHEBLEND_SERVER_KEY", keys["left"])
        with ServedEngine(address) as left, ServedEngine(f"{address}/v1/", keys["right"]) as right:
            left.add(STORY)
            assert (len(left.ids()), right.ids()) == (3, [])
            assert left.namespace != right.namespace
            with pytest.raises(errors.UnknownChunkError):
                right.generate(PROMPT, 4)


@pytest.mark.parametrize(
    ("url", "kind", "why"),
    [
        ("http://127.0.0.1:1", errors.BackendError, "reached"),
        ("127.0.0.1:8000", errors.ConfigError, "address"),
        ("http://user:word@127.0.0.1:8000", errors.ConfigError, "address"),
    ],
)
def test_an_address_where_nobody_is(url: str, kind: type[errors.CacheBlendError], why: str) -> None:
    with pytest.raises(kind, match=why):
        ServedEngine(url)


SAYS = {
    "Qwen3": "<think>\nIt rains.\n</think>\n\n",
    "gpt-oss": "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("name", list(SAYS))
def test_thoughts_are_apart_from_answers(serve: Serve, name: str) -> None:
    dictation = Dictation(name)
    with dictation.engine:
        client = serve(dictation.engine)
        wanted = ("It rains.", "It p", "stop")
        with ServedEngine(str(client.base_url)) as served:
            text = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
            ending = Ending(("ai",), None, lexer_of(served.tokenizer).thinking([text]))
            dictation.say(f"{SAYS[name]}It paints.", ends=True)
            criteria = ending.criteria(served.tokenizer)
            answer = ending.read(served.generate(BlendPrompt(segments=[text]), 60, stopping_criteria=criteria))
        assert (answer.thoughts, answer.text, answer.finish_reason) == wanted
        asked = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60, "stop": "ai"}
        dictation.say(f"{SAYS[name]}It paints.", ends=True)
        whole = ask(client, **asked)
        [choice] = whole["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == wanted
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        dictation.say(f"{SAYS[name]}It paints.", ends=True)
        deltas = [event["choices"][0]["delta"] for event in events(client, temperature=0, **asked)]
        said = ["".join(delta.get(kind, "") for delta in deltas) for kind in ("reasoning_content", "content")]
        assert said == list(wanted[:2])
