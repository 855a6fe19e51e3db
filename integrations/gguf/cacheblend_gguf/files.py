"""Files of GGUF models: on this machine or on the Hugging Face Hub, in one piece or in several."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model.checkpoint import GGUF_MAGIC, gguf_files

__all__ = ["find_file", "parts_of"]

# Of a model in several files, what their names differ in, and how many they are.
_NUMBER = re.compile(r"(?<=-)\d{5}(?=-of-(\d{5})\.gguf$)", re.IGNORECASE)


def find_file(model: str | Path) -> Path:
    """Return the file of a model, the first of several: it is named itself, or by its folder, or on the Hub by
    ``repo/name:file.gguf``; `ConfigError` if there is none, or something else.
    """
    # What encodes pictures for a model is no other model.
    files = list(dict.fromkeys(_numbered(each, 1) for each in gguf_files(model) if not each.name.startswith("mmproj")))
    if len(files) > 1:
        raise ConfigError(f"model {model} is a folder with {len(files)} GGUF models; name one, {files[0]} for example")
    if not files:
        raise ConfigError(f"model {model} cannot be loaded: it is neither a GGUF file nor a folder with one")
    file = files[0]
    if not file.is_file():
        file = _downloaded(str(model))
    for part in parts_of(file):
        if not part.is_file():
            raise ConfigError(f"model {model} cannot be loaded: of its files {part.name} is not there; download it too")
        with part.open("rb") as opened:
            begin = opened.read(len(GGUF_MAGIC))
        if begin != GGUF_MAGIC:
            raise ConfigError(
                f"model {model} cannot be loaded: {part.name} is not a GGUF file, for it begins with {begin!r}; download it again"
            )
    return file


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model whose first one is given."""
    number = _NUMBER.search(file.name)
    return [_numbered(file, each) for each in range(1, int(number[1]) + 1)] if number else [file]


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(_NUMBER.sub(f"{number:05}", file.name))


def _downloaded(model: str) -> Path:
    repo, _, name = model.partition(":")
    if not name or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model {model} cannot be loaded: there is no such GGUF file; name one that is there, or one of the Hugging Face "
            "Hub as repo/name:file.gguf"
        )
    try:
        first, *_ = [Path(hf_hub_download(repo, str(each))) for each in parts_of(_numbered(Path(name), 1))]
    except LocalEntryNotFoundError as error:
        why = "it was not downloaded before, and the Hugging Face Hub cannot be reached"
        raise ConfigError(f"model {model} cannot be loaded: {why}; name a file that is here") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {model} cannot be loaded: the Hugging Face Hub has no {repo} that you may see"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigError(f"model {model} cannot be loaded: {repo} has no file {name}") from error
    except (OSError, HFValidationError) as error:
        raise ConfigError(f"model {model} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return first
