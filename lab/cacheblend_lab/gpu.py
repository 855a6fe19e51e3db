"""All that needs a GPU, in pieces of minutes: ``python -m cacheblend_lab.gpu``, in a clone; ``make gpu`` runs it.

A piece is a command of its own that leaves a file of figures. One whose file is there, from this kind of GPU, is not run again,
so that a call which is stopped, or is given few minutes, is gone on with by the next. `docs/gpu.md` is made from the files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch

from cacheblend_lab.bench.runner import cell, heading, shown
from cacheblend_lab.real_model import RealModel
from cacheblend_lab.settings import environment_without_settings
from cacheblend_rag.cli.output import write_json

__all__ = ["PIECES", "Piece", "main", "page", "run_pieces"]

_TESTS = "pytest"


@dataclass(frozen=True)
class Piece:
    """A command that is run on a GPU.

    Attributes
    ----------
    name : str
        Its file is ``gpu-NAME.json``.
    what : str
        What it finds out, for people.
    command : str
        As one types it in a shell, but for ``--json``: of ``cacheblend-rag``, of pytest, or of a module of Python. Its variables
        are ``QWEN_05B`` and ``QWEN_15B``, folders of the real models, ``VLLM_BIN``, that of vLLM's programs, and ``FOLDER``, an
        empty one.
    minutes : float
        How long it takes on a GPU of a data centre, at most. It is not begun where less is left.
    """

    name: str
    what: str
    command: str
    minutes: float

    @property
    def is_tests(self) -> bool:
        """Whether it runs tests rather than measures."""
        return self.command.startswith(_TESTS)

    def shell_command(self, figures: Path) -> str:
        """Return the command of a process that writes its figures to a file."""
        program, _, rest = self.command.partition(" ")
        programs = {_TESTS: ["-m", _TESTS], "python": [], "cacheblend-rag": ["-c", _APP]}
        output = f"--junitxml={figures}" if self.is_tests else f"--json={figures}"
        return f"exec {shlex.join([sys.executable, *programs[program]])} {rest} {shlex.quote(output)}"

    def lacks(self) -> str | None:
        """Return what must be there before it can be run, if anything."""
        for variable, size in _SIZES.items():
            model = RealModel(size)
            if f"${variable}" in self.command and not model.folder.exists():
                return f"`make model ARGS={size}` fetches {model.folder}"
        if "$VLLM_BIN" in self.command and _vllm_bin() is None:
            return "vLLM's programs are not on the PATH; give VLLM_BIN, the folder of them"
        return None


_APP = "from cacheblend_rag.cli.app import app; app()"
_SIZES = {"QWEN_05B": "0.5b", "QWEN_15B": "1.5b"}


def _vllm_bin() -> str | None:
    """Return the folder of vLLM's programs, with this project's beside them."""
    found = which("vllm", path=os.environ.get("VLLM_BIN") or None)
    return found and str(Path(found).parent)


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of a piece, with what its command may name."""
    models = {variable: str(RealModel(size).folder) for variable, size in _SIZES.items()}
    return environment_without_settings() | models | {"VLLM_BIN": _vllm_bin() or "", "FOLDER": folder}


# A piece that may take longer than a whole call is begun where nearly all of the call is left.
_WHOLE_SHARE = 0.9
_CUDA = "--device cuda --dtype bfloat16"
_VLLM = "--dtype bfloat16 --max-model-len 8192 --max-num-seqs 32"


def _real(size: str, tokens: str, minutes: float) -> Piece:
    return Piece(
        f"real-{size}",
        f"Qwen2.5-Coder-{size.upper()} alone, from stored KV in RAM and on disk, and with 15 % recomputed",
        f"python -m cacheblend_lab.bench.real $QWEN_{size.upper().replace('.', '')} --tokens {tokens} --rounds 5 "
        f"--ratios 0.15 --disk {_CUDA}",
        minutes,
    )


def _answers(size: str, step: int, minutes: float) -> Piece:
    return Piece(
        f"answers-{size}",
        f"right answers of Qwen2.5-Coder-{size.upper()} about the manual, by full prefill and from stored KV",
        f"python -m cacheblend_lab.answers $QWEN_{size.upper().replace('.', '')} manual own own/boundary@0.15 --step {step} "
        f"--out $FOLDER/answers.jsonl {_CUDA}",
        minutes,
    )


def _server(name: str, what: str, prompts: str, start: str) -> Piece:
    return Piece(
        f"vllm-{name}",
        f"vLLM {what}, Qwen2.5-Coder-1.5B, 10 chunks of about 530 tokens",
        f"cacheblend-rag bench serve --prompts {prompts} --corpus 60 --chunks 10 --chunk-words 256 --rates 4,16 --seconds 10 "
        f"--url http://127.0.0.1:8765 --start '{start}'",
        2,
    )


PIECES = (
    Piece("tests", "tests that need a GPU", f"{_TESTS} -q -m cuda tests", 2),
    _real("1.5b", "4000,16000", 2),
    _answers("1.5b", 5, 1.5),
    _server(
        "prefix",
        "with its prefix cache",
        "text",
        f"$VLLM_BIN/python -m vllm.entrypoints.openai.api_server --model $QWEN_15B --port 8765 {_VLLM}",
    ),
    _server(
        "stored",
        "behind stored KV",
        "documents",
        f"$VLLM_BIN/cacheblend-rag serve --backend vllm --model $QWEN_15B --store $FOLDER/kv --port 8765 -- {_VLLM}",
    ),
    _real("0.5b", "16000", 1),
    Piece(
        "ttft-llama-3.1-8b",
        "time to the first token at the shape of llama-3.1-8b, random weights, 20 chunks of 512 tokens, by where the KV is",
        "cacheblend-rag bench ttft --shape llama-3.1-8b --chunks 20 --chunk-tokens 512 --ratios 0,0.15 "
        f"--tiers ram,disk --head-tokens 128 --separator-tokens 2 --repeats 5 {_CUDA}",
        1.5,
    ),
    _answers("0.5b", 10, 1),
)
"""Every piece, in the order in which they are run: the most valuable first."""

_HEAD = """# On a GPU

```
make model && make model ARGS=1.5b                    # Qwen2.5-Coder-Instruct, about 1.6 GB of files and 4 GB of folders
make gpu VLLM_BIN=/path/of/vllm/environment/bin       # VLLM_BIN only if `vllm` is not on the PATH
```

Run this in a clone on a machine with a CUDA device. It runs every test and measurement that needs one, the most valuable first,
for ten minutes (`ARGS="--minutes 60"` for longer); the next call goes on where one stopped. It writes this page
from the results (`docs/results/gpu-*.json`, with device, date and command). To repeat a measurement on the same kind of GPU,
delete its file. In the commands, `QWEN_05B` and `QWEN_15B` are the models' folders, and `FOLDER` is an empty one.
What needs a model or a vLLM that is not there is left out; this project must be installed in [vLLM's environment](vllm.md) too.
"""
_NOTHING = """
**Nothing has been measured on a GPU yet.** What this documentation says about CUDA (page-locked memory, the side stream)
describes the design; all figures elsewhere are from CPUs.
"""


def page(folder: Path, pieces: Sequence[Piece] = PIECES) -> str:
    """Return the page that the files in a folder make."""
    parts = [_HEAD]
    found = {piece: _read(_file(folder, piece)) for piece in pieces}
    if not any(found.values()):
        return _HEAD + _NOTHING
    for piece, result in found.items():
        if result is None:
            continue
        machine, versions = result["machine"], result["versions"]
        where = f"{machine['gpu']}, CUDA {machine['cuda']}, torch {versions['torch']}, {result['date'][:10]}"
        parts.append(f"\n## {piece.what[0].upper()}{piece.what[1:]}\n\n`{piece.command}`\n\n{where}.\n")
        if result.get("still_cached"):
            parts.append("\nFiles stayed in the page cache when it was emptied: times from disk are not the disk's.\n")
        parts.append("\n" + "\n".join(_table(result["rows"])) + "\n")
    lacking = [piece.name for piece in pieces if found[piece] is None]
    if lacking:
        parts.append(f"\nNot measured yet: {', '.join(lacking)}.\n")
    return "".join(parts)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = shown(rows)
    lines = ["| " + " | ".join(map(heading, columns)) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(cell(name, row.get(name)) or "" for name in columns) + " |" for row in rows]


def _file(folder: Path, piece: Piece) -> Path:
    return folder / f"gpu-{piece.name}.json"


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def run_pieces(
    pieces: Sequence[Piece], folder: Path, gpu: str | None, minutes: float, say: Callable[[str], None]
) -> list[Piece]:
    """Run the pieces that are not there yet from this kind of GPU, one after the other; return those that failed.

    Of one that fails, what it printed stays in the folder, as ``gpu-NAME.log``. What does not end in the minutes is ended.
    """
    ends = time.monotonic() + 60 * minutes
    failed, left = [], []
    for number, piece in enumerate(pieces, 1):
        label = f"{number} of {len(pieces)}, {piece.name}"
        known = _read(_file(folder, piece))
        if known is not None and known["machine"]["gpu"] == gpu:
            say(f"{label}: measured on {known['date'][:10]}")
            continue
        if lack := piece.lacks():
            say(f"{label}: left out: {lack}")
            continue
        seconds = ends - time.monotonic()
        if seconds < min(60 * piece.minutes, 60 * minutes * _WHOLE_SHARE):
            left.append(piece)
            continue
        say(f"{label}: {piece.command}")
        began = time.monotonic()
        trouble = _run(piece, folder, seconds)
        if trouble is None:
            say(f"{label}: done in {time.monotonic() - began:.0f} s")
        else:
            say(f"{label}: failed: {trouble}")
            failed.append(piece)
    if left:
        say(f"left for the next call: {', '.join(piece.name for piece in left)}")
    return failed


def _run(piece: Piece, folder: Path, seconds: float) -> str | None:
    """Run a piece; return what went wrong, if anything."""
    folder.mkdir(parents=True, exist_ok=True)
    file = _file(folder, piece)
    figures, log = file.with_suffix(".tmp"), file.with_suffix(".log")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output, TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        # A session of its own, so that a piece ends with all that it has started.
        process = subprocess.Popen(
            piece.shell_command(figures),
            shell=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(empty),
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"not done after {seconds:.0f} s; see {log}, and give more --minutes"
    if status or not figures.exists():
        return f"exit status {status}; see {log}"
    if piece.is_tests:
        rows = [_counts(figures) | {"seconds": time.monotonic() - began}]
        figures.unlink()
        write_json(file, _TESTS, rows, arguments=shlex.split(piece.command))
    else:
        figures.replace(file)
    log.unlink()
    return None


def _counts(junit: Path) -> dict[str, int]:
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    total = {"tests": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, "0"))
    return {"passed": total["tests"] - total["skipped"], "skipped": total["skipped"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 if a piece failed, 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="how long the call may take")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of gpu.md, and of results/gpu-*.json")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no CUDA device here, so that nothing was run; the {len(PIECES)} pieces need one"
        )
        return 0
    # Whoever ends this ends the piece under way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = given.docs / "results"
    failed = run_pieces(PIECES, folder, torch.cuda.get_device_name(), given.minutes, partial(print, flush=True))
    (given.docs / "gpu.md").write_text(page(folder), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
