"""Training a preamble: its prompts are those of the engine, and what is trained brings answers nearer to full prefill's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_attachments.training import PreambleTrainer
from cacheblend_lab.families import tiny as families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from integrations.attachments.tests.calibration.conftest import model_folder as model_folder
from integrations.attachments.tests.calibration.conftest import run as run
from tests.cli.conftest import Command
from tests.families import tiny_model, tiny_tokenizer, words
from tests.limits import one_thread as one_thread

TEXTS = [words(400, 1), words(500, 2), "t5 t6"]


def engine_of(family: str = "llama", **settings: Any) -> BlendEngine:
    model = families.tiny_model(families.tiny_config(family)) if family == "gpt2" else tiny_model(family)
    return BlendEngine(model, tiny_tokenizer(), **engine_settings(self_check=False, **settings))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_a_prompt_is_read_as_the_engine_reads_it(family: str) -> None:
    with engine_of(family, context="document") as engine:
        trainer = PreambleTrainer(engine, TEXTS, steps=1)
        task = trainer._task(trainer._random)
        chunks = [
            Chunk(engine.tokenizer.decode(piece), f"{document}-{number}", document=str(document), start=number * 1000)
            for document, pair in enumerate(task.pairs)
            for number, piece in enumerate(pair)
        ]
        engine.add(chunks)
        question, answer = task.questions[0]
        parts = [trainer._head, *(chunks[number].id for number in task.order), [*question, *answer]]
        prompt = BlendPrompt(segments=[part if isinstance(part, list) else ChunkRef(part) for part in parts])
        result = engine.prefill(prompt, logits_to_keep=len(answer) + 1)
        assert result.report.hits == len(chunks) and result.report.recomputed_tokens == 0
        with torch.no_grad():
            _, head = trainer._read(trainer._head)
            context = trainer._joined(head, [trainer._encoded(pair) for pair in task.pairs], task.order)
            ours = trainer._answers(context, question, answer)
        assert (ours - result.logits[:-1].log_softmax(-1)).abs().max() < 1e-3


def test_training_brings_answers_nearer_and_leaves_the_model_as_it_is() -> None:
    with engine_of() as engine:
        before = {name: each.clone() for name, each in engine.model.named_parameters()}
        trainer, again = (PreambleTrainer(engine, TEXTS, steps=12, learning_rate=0.03) for _ in range(2))
        start = trainer.divergence(4)
        losses = [trainer.step() for _ in range(12)]
        assert trainer.divergence(4) < 0.95 * start
        assert [again.step() for _ in range(12)] == losses
        assert trainer.preamble().digest == again.preamble().digest != engine.preamble().digest
        assert all(each.equal(before[name]) and each.requires_grad for name, each in engine.model.named_parameters())


def test_what_cannot_be_trained() -> None:
    with engine_of() as engine, pytest.raises(ConfigError, match="the documents have 302 tokens; 640 or more"):
        PreambleTrainer(engine, [words(300, 1), "t5 t6"], steps=1)
    with engine_of("gpt2") as engine, pytest.raises(UnsupportedModelError, match="cannot be moved"):
        PreambleTrainer(engine, TEXTS, steps=1)


def test_the_command(run: Command, model_folder: Path, tmp_path: Path, one_thread: None) -> None:
    document, file = tmp_path / "long.txt", tmp_path / "trained.safetensors"
    document.write_text("The harbour is deep, and ships rest there all winter. " * 30)
    output = run("train-preamble", document, "--model", model_folder, "--out", file, "--steps", "2").output
    assert "nats a token before" in output and f"CACHEBLEND_PREAMBLE={file}" in output
    with BlendEngine.from_pretrained(model_folder, **engine_settings(preamble=file)) as engine:
        assert engine.add([Chunk("The harbour is deep.", "a")]).encoded == 1
    assert "must end in .safetensors" in run("train-preamble", document, "--out", tmp_path / "x", code=2).output
