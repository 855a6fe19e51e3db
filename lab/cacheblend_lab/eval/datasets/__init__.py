"""Data sets in their public formats, from local files, as the evaluation takes them; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from cacheblend_lab.eval.datasets.longbench import load_longbench
from cacheblend_lab.eval.datasets.multinews import load_multinews
from cacheblend_lab.eval.datasets.passages import load_musique, load_wikimqa
from cacheblend_lab.eval.datasets.qa import load_qa
from cacheblend_lab.eval.datasets.samsum import load_samsum
from cacheblend_lab.eval.datasets.subtasks import LONGBENCH_SUBTASKS
from cacheblend_lab.eval.task import EvalTask
from cacheblend_rag.errors import ConfigError

__all__ = ["DATASETS", "LONGBENCH_SUBTASKS", "load_task"]

DATASETS = ("qa", "musique", "2wikimqa", "samsum", "multinews", "longbench")
"""Tasks that `load_task` can load."""


def load_task(
    name: str,
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    subtask: str | None = None,
    whole: bool = False,
    examples: str | os.PathLike[str] | None = None,
) -> EvalTask:
    """Load a data set from local files in its public format.

    Parameters
    ----------
    name : str
        One of `DATASETS`.
    path : path
        Its file; for samsum and longbench it may be the folder.
    limit : int, optional
        Most questions: the first in the file. What comes after them is not read.
    subtask : str, optional
        longbench only: which one, of `LONGBENCH_SUBTASKS`; needed where `path` is a folder.
    whole : bool
        longbench only: whether the model is given all documents of a context, each as one chunk.
    examples : path, optional
        samsum only: the file from which examples are drawn.

    Returns
    -------
    EvalTask
        Contexts of one question each; of those of qa, several.

    Raises
    ------
    DatasetError
        If a file cannot be read, is of another form, holds no question, or a record has a flaw; the message says which and where.
    ConfigError
        If the name is unknown, an option has no meaning, or a metric needs a package that is not installed.
    """
    if name not in DATASETS:
        raise ConfigError(f"data set {name!r} is unknown; choose one of {', '.join(DATASETS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} leaves no question; give 1 or more")
    if subtask is not None and name != "longbench":
        raise ConfigError(f"subtask={subtask!r} cannot be used with {name}; only longbench has subtasks")
    if whole and name != "longbench":
        raise ConfigError(f"whole={whole} cannot be used with {name}; only longbench gives whole documents")
    if examples is not None and name != "samsum":
        raise ConfigError(f"examples={os.fspath(examples)!r} cannot be used with {name}; only samsum shows examples")
    file = Path(path)
    if name == "samsum":
        return load_samsum(file, limit, None if examples is None else Path(examples))
    if name == "longbench":
        return load_longbench(file, limit, subtask, whole)
    loaders = {"qa": load_qa, "musique": load_musique, "2wikimqa": load_wikimqa, "multinews": load_multinews}
    return loaders[name](file, limit)
