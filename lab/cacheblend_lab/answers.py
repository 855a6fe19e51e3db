"""Answers from stored KV beside full prefill's: ``python -m cacheblend_lab.answers MODEL SET [WAY ...] --out FILE``.

MODEL is an id of the Hugging Face Hub, a folder or a GGUF file; SET is "manual", "ledgers" or a file (`cacheblend_lab.sets`).
A way is ``COMPANIONS``, or ``COMPANIONS/SELECTOR@RATIO``: "own", "similar/boundary@0.07".
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.sets import Question, QuestionSet, holds, read_set
from cacheblend_rag.chat.render import around_context
from cacheblend_rag.chunk import BlendPrompt, Chunk, FixedText
from cacheblend_rag.cli.output import write_json
from cacheblend_rag.companions import Nearness
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.lexer import lexer_of

__all__ = ["Trial", "copying", "ledgers", "manual", "summary", "table"]

CHUNK_TOKENS, RETRIEVED, ANSWER_TOKENS = 220, 5, 24
FULL_PREFILL = BlendConfig(recompute_ratio=1)
_SENTENCE = re.compile(r"[A-Z][^.!?\n]{80,240}[.]")
_COPIED_WORDS = 8


def manual() -> QuestionSet:
    """Return pages of Python's manual: the demonstration's questions, and more of their kind."""
    lines = files("cacheblend_lab.demo").joinpath("manual_questions.jsonl").read_text("utf-8").splitlines()
    more = [Question(row["question"], tuple(row["answers"])) for row in map(json.loads, lines)]
    documents = [re.sub(r"[ \t]+", " ", page) for page in pages().values()]
    everything = tuple(range(len(documents)))
    asked = [replace(question, documents=everything) for question in (*QUESTIONS, *more)]
    return QuestionSet(documents, asked, score=holds)


def copying(given: QuestionSet, each: int) -> QuestionSet:
    """Return a set's documents, and beginnings of so many sentences of each, to be continued word for word."""
    everything = tuple(range(len(given.documents)))
    questions = []
    for number, text in enumerate(given.documents):
        sentences = [sentence.split() for sentence in _SENTENCE.findall(" ".join(text.split()))]
        for words in random.Random(number).sample(sentences, min(each, len(sentences))):
            half = len(words) // 2
            rest = " ".join(words[half : half + _COPIED_WORDS])
            questions.append(Question(" ".join(words[:half]), (rest,), everything))
    head = "Continue the text from the context, word for word.\n\n"
    return QuestionSet(given.documents, questions, head, "Continue: {}", holds)


def ledgers(count: int = 20) -> QuestionSet:
    """Return ledgers of eight paragraphs that differ in their numbers alone; each is asked for all the numbers of one."""
    documents: list[str] = []
    questions = []
    for number in range(count):
        draw = random.Random(number)
        place, made = draw.choice(["mill", "quarry", "dairy", "forge"]), draw.choice(["sacks", "crates", "barrels"])
        figures = [[draw.randint(11, 99) for _ in range(6)] for _ in range(8)]
        paragraphs = []
        for ward, counts in enumerate(figures, 1):
            lines = (
                f"The clerk of ward {ward} noted on day {day} that the {place} {number} had filled {filled} {made}."
                for day, filled in enumerate(counts, 1)
            )
            paragraphs.append(f"Paragraph {ward}. {' '.join(lines)}")
        documents.append("\n\n".join(paragraphs))
        ward = draw.randrange(8)
        text = f"How many {made} had the {place} {number} filled in ward {ward + 1} on each day? List the numbers only."
        questions.append(Question(text, (" ".join(map(str, figures[ward])),), (number,)))
    return QuestionSet(documents, questions, score=holds)


class Trial:
    """Questions asked of one model in several ways, each over the chunks that share most rare words with it.

    Parameters
    ----------
    engine : BlendEngine or GGUFEngine
        The model; engines over it are made with stores of their own.
    given : QuestionSet
        What is asked.
    folder : Path
        Where stores are made.
    chunk_tokens, retrieved : int
        Tokens of a chunk, and chunks of a prompt.
    whole : bool
        Whether a prompt has all paragraphs of its question's document, the last one first.
    """

    def __init__(
        self,
        engine: Any,
        given: QuestionSet,
        folder: Path,
        chunk_tokens: int = CHUNK_TOKENS,
        retrieved: int = RETRIEVED,
        whole: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._set, self._folder = engine, engine.tokenizer, given, folder
        tokenizer = self._tokenizer
        self._retrieved, self._whole = retrieved, whole
        parts = given.head, given.tail
        head, self._tail = around_context(tokenizer, *parts) if getattr(tokenizer, "chat_template", None) else parts
        self._head = FixedText(head)
        self._chunks: list[Chunk] = []
        # The numbers of each document's chunks.
        self._of: list[range] = []
        for number, document in enumerate(given.documents):
            first, start = len(self._chunks), 0
            for text in self._pieces(document, chunk_tokens):
                self._chunks.append(Chunk(text, str(len(self._chunks)), document=str(number), start=start))
                start += len(text)
            self._of.append(range(first, len(self._chunks)))
        self._tokens = [self._ids(chunk.text) for chunk in self._chunks]
        # Of the chunks of documents that are asked about together.
        self._near: dict[tuple[int, ...], Nearness] = {}
        self._engines: dict[str, BlendEngine] = {}

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text.casefold(), add_special_tokens=False).input_ids)

    def _pieces(self, text: str, size: int) -> list[str]:
        if self._whole:
            return text.split("\n\n")
        lexer = lexer_of(self._tokenizer)
        ids, _ = lexer.read(text)
        starts = [len(lexer.text(ids[:at])) for at in range(0, len(ids), size)]
        return [text[begin:end] for begin, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    def prompt(self, question: Question) -> BlendPrompt:
        """Return the prompt of a question."""
        numbers = [number for document in question.documents for number in self._of[document]]
        if self._whole:
            chosen = numbers[::-1]
        else:
            if question.documents not in self._near:
                self._near[question.documents] = Nearness([self._tokens[number] for number in numbers])
            nearest = self._near[question.documents].nearest(self._ids(question.text), self._retrieved)
            chosen = [numbers[each] for each in nearest]
        return BlendPrompt(self._head, list(map(str, chosen)), self._tail.replace("{}", question.text))

    def engine(self, companions: str) -> Any:
        """Return the engine with these companions; its chunks are named, and encoded when they are first asked for."""
        if companions not in self._engines:
            namer = self._another(companions, prefix_bytes=0)
            namer.add(self._chunks, background=True)
            namer.close(wait=False)
            self._engines[companions] = self._another(companions, prefix_bytes=0)
        return self._engines[companions]

    def _another(self, companions: str, **changes: Any) -> Any:
        config = EngineConfig(separator="\n\n", companions=companions, **changes)
        return self._model.another(config=config, store=self._folder / companions)

    def after(self, engine: Any, prompt: BlendPrompt, answer: Sequence[int], blend: BlendConfig) -> torch.Tensor:
        """Return the log-probabilities at each token of an answer, ``(tokens, vocab)``."""
        forced = BlendPrompt(segments=[*prompt.segments, answer[:-1]]) if answer[1:] else prompt
        logits: torch.Tensor = engine.prefill(forced, blend=blend, logits_to_keep=len(answer)).logits
        return logits.cpu().float().reshape(len(answer), -1).log_softmax(-1)

    def ask(self, number: int, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield what each way makes of the question of a number, full prefill first.

        A way's loss is the mean KL divergence, in nats, of its next token's distribution from full prefill's, over full
        prefill's own answer.
        """
        prompt = self.prompt(self._set.questions[number])
        companions = ways[0].partition("/")[0]
        self.engine(companions)
        # It keeps the prompt's own KV, so that it is read once.
        with self._another(companions) as alone:
            given = alone.generate(prompt, ANSWER_TOKENS, blend=FULL_PREFILL, do_sample=False)
            text, answer = given.text, list(given.token_ids)
            wanted = self.after(alone, prompt, answer, FULL_PREFILL)
        yield self._row(number, "full", text, True, 0.0, given.report.ttft_s)
        for way in ways:
            companions, _, rest = way.partition("/")
            selector, _, ratio = rest.partition("@")
            blend = (
                BlendConfig(selector=selector, recompute_ratio=float(ratio)) if rest else BlendConfig(recompute_ratio=0)
            )
            engine = self.engine(companions)
            report = engine.prefill(prompt, blend=blend).report
            if report.misses:
                # Now they are stored, as they are for the next question.
                engine.flush()
                report = engine.prefill(prompt, blend=blend).report
            found = self.after(engine, prompt, answer, blend)
            loss = float((wanted.exp() * (wanted - found)).sum(-1).mean())
            own, same = text, bool((found.argmax(-1) == torch.tensor(answer)).all())
            if not same:
                own = engine.generate(prompt, ANSWER_TOKENS, blend=blend, do_sample=False).text
            yield self._row(number, way, own, same, loss, report.ttft_s)

    def _row(self, number: int, way: str, answer: str, same: bool, loss: float, seconds: float) -> dict[str, Any]:
        question = self._set.questions[number]
        score, right = self._set.score(answer, question.answers), question.is_answered_by(answer)
        told = {"number": number, "question": question.text, "way": way, "answer": answer, "seconds": seconds}
        return {**told, "score": score, "right": right, "same": same, "loss": loss}

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how each way did: of those `asked`, the `right` ones, and of full prefill's right ones (`kept_of`) those `kept`."""
    by_way: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_way[row["way"]][row["number"]] = row
    right = {number for number, row in by_way["full"].items() if row["right"]}
    told = []
    for way, found in by_way.items():
        asked, wanted = list(found.values()), [found[each]["right"] for each in right & found.keys()]
        losses = [row["loss"] for row in asked]
        figures = {"way": way, "asked": len(asked), "right": sum(row["right"] for row in asked)}
        figures |= {"kept": sum(wanted), "kept_of": len(wanted), "same": fmean(row["same"] for row in asked)}
        figures |= {"loss_mean": fmean(losses), "loss_median": median(losses)}
        figures |= {"score": fmean(row["score"] for row in asked)}
        sooner = median(by_way["full"][each]["seconds"] / row["seconds"] for each, row in found.items())
        told.append(figures | {"speedup": sooner})
    return told


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return in Markdown how each way did; of full prefill's right answers, how many are kept."""
    lines = [
        "| | loss, mean | loss, median | score | right | of full prefill's | same answer | first token sooner |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in summary(rows):
        line = (
            "| {way} | {loss_mean:.4f} | {loss_median:.4f} | {score:.3f} | {right} of {asked} | {kept} of {kept_of} "
            "| {same:.2f} | {speedup:.1f}x |"
        )
        lines.append(line.format(**each))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Ask, and print a table; what is in the output already is not asked again."""
    parser = argparse.ArgumentParser(prog="python -m cacheblend_lab.answers", description=__doc__)
    parser.add_argument("model", help="an id of the Hugging Face Hub, a folder, or a GGUF file")
    parser.add_argument("set", help="manual, ledgers, or a file of questions")
    parser.add_argument("ways", nargs="*", default=["own", "own/boundary@0.07"])
    parser.add_argument("--out", type=Path, required=True, help="answers, one a line")
    parser.add_argument("--json", type=Path, help="also write the table to a file, as JSON")
    parser.add_argument("--dtype", default="float32", help="of a model that transformers load")
    parser.add_argument("--device", help="cpu or cuda:N; by default CUDA where there is one")
    parser.add_argument("--step", type=int, default=1, help="ask every so many questions one")
    parser.add_argument("--copying", type=int, help="continue so many sentences of each document instead")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--retrieved", type=int, default=RETRIEVED, help="chunks of a prompt")
    parser.add_argument("--store", help="where KV is kept for the next time; by default nowhere")
    options = parser.parse_args(arguments)
    own = {"manual": manual, "ledgers": ledgers}
    given = own[options.set]() if options.set in own else read_set(Path(options.set))
    given = copying(given, options.copying) if options.copying else given
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {row["number"] for row in rows}
    with ExitStack() as stack:
        engine = stack.enter_context(
            BlendEngine.from_pretrained(options.model, config=EngineConfig(dtype=options.dtype, device=options.device))
        )
        folder = Path(options.store or stack.enter_context(tempfile.TemporaryDirectory()))
        trial = Trial(engine, given, folder, options.chunk_tokens, options.retrieved, whole=options.set == "ledgers")
        stack.callback(trial.close)
        out = stack.enter_context(options.out.open("a"))
        for number in range(0, len(given.questions), options.step):
            if number not in known:
                found = list(trial.ask(number, options.ways))
                rows += found
                out.writelines(json.dumps(row) + "\n" for row in found)
                out.flush()
    print(table(rows))
    write_json(options.json, "answers", summary(rows), model=Path(options.model).name)


if __name__ == "__main__":
    main()
