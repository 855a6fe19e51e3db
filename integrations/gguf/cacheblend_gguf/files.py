"""Files of GGUF models: on this machine or on the Hugging Face Hub, in one piece or in several."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model.checkpoint import gguf_files

__all__ = ["find_file", "parts_of"]

# Of a model in several files, what their names differ in, and how many they are.
_NUMBER = re.compile(r"(?<=-)\d{5}(?=-of-(\d{5})\.gguf$)", re.IGNORECASE)


def find_file(model: str | Path) -> Path:
    """Return the file of a model, the first of several: it is named itself, or by its folder, or on the Hub by
    ``repo/name:file.gguf``; `ConfigError` if there is none.
    """
    # What encodes pictures for a model is no other model.
    named = [parts_of(each)[0] for each in gguf_files(model) if not each.name.startswith("mmproj")]
    files = list(dict.fromkeys(named))
    if len(files) > 1:
        raise ConfigError(f"model {model} is a folder with {len(files)} GGUF models; name one, {files[0]} for example")
    if files and files[0].is_file():
        return files[0]
    repo, _, name = str(model).partition(":")
    if not files or not name or repo.startswith((".", "/", "~")):
        raise ConfigError(
            f"model {model} cannot be loaded: there is no such GGUF file; name one that is there, a folder with one, or one of "
            "the Hugging Face Hub as repo/name:file.gguf"
        )
    try:
        first, *_ = [Path(hf_hub_download(repo, str(each))) for each in parts_of(Path(name))]
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"model {model} cannot be loaded: {' '.join(str(error).split())}") from error
    return first


def parts_of(file: Path) -> list[Path]:
    """Return all files of a model of which one is given."""
    number = _NUMBER.search(file.name)
    numbers = range(1, int(number[1]) + 1) if number else ()
    return [file.with_name(_NUMBER.sub(f"{each:05}", file.name)) for each in numbers] or [file]
