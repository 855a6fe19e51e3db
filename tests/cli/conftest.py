"""A tiny random model in a folder, a few documents, and the command called in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import Result

from cacheblend_lab.reference import WEIGHTS_DIR
from cacheblend_rag.documents.library import PASSAGES, open_chroma
from tests.command import read_rows as read_rows
from tests.command import run as run_command
from tests.families import tiny_reader
from tests.limits import one_thread as one_thread

Command = Callable[..., Result]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers that reads bytes and answers nonsense, always the same."""
    folder = tmp_path_factory.mktemp("model")
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    text = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text, bos_token="<s>", eos_token="</s>", model_max_length=8192)
    tokenizer.chat_template = (WEIGHTS_DIR / "chat_template.jinja").read_text()
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    tiny_reader(vocab_size=len(words), max_position_embeddings=8192, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Three files in two folders, eight short passages at 40 tokens each."""
    folder = tmp_path / "documents"
    (folder / "more").mkdir(parents=True)
    (folder / "mara.md").write_text(
        "# Mara\n\nMara Lind was born in Oslo.\n\nShe keeps a striped goat.\n\nShe moved north in spring.\n",
        encoding="utf-8",
    )
    (folder / "harbour.txt").write_text("The harbour is deep.\n\nShips rest there all winter.\n", encoding="utf-8")
    (folder / "more" / "tower.md").write_text(
        "The light tower is old.\n\nNobody lives in it.\n\nIts lamp was sold.\n\nIt is painted red.\n", encoding="utf-8"
    )
    return folder


@pytest.fixture
def run() -> Command:
    """The command in this process."""
    return run_command


def passages_of(store: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Text and metadata of everything in Chroma, by id."""
    with open_chroma(store) as client:
        found: Any = client.get_collection(PASSAGES, embedding_function=None).get(include=["documents", "metadatas"])
    all_of_them = zip(found["ids"], found["documents"], found["metadatas"], strict=True)
    return {id: (text, dict(about)) for id, text, about in all_of_them}
