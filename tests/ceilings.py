"""How large the project may be: ``python -m tests.ceilings`` prints the table, and fails where a figure is over its ceiling.

A ceiling only ever falls. Who needs more room takes other lines out first, and who takes lines out lowers the ceiling with them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

LINES = {
    "cacheblend_rag": (19692, 111),
    "cacheblend_rag/chat": (1336, 8),
    "cacheblend_rag/cli": (1053, 9),
    "cacheblend_rag/codec": (351, 3),
    "cacheblend_rag/conversation": (504, 3),
    "cacheblend_rag/documents": (649, 5),
    "cacheblend_rag/engine": (4743, 18),
    "cacheblend_rag/fuse": (735, 6),
    "cacheblend_rag/loader": (501, 4),
    "cacheblend_rag/model": (1769, 12),
    "cacheblend_rag/selection": (644, 6),
    "cacheblend_rag/store": (4756, 16),
    "examples": (743, 15),
    "integrations/attachments/cacheblend_attachments": (3207, 19),
    "integrations/gguf/cacheblend_gguf": (1410, 8),
    "integrations/hybrid/cacheblend_hybrid": (540, 4),
    "integrations/langchain/langchain_cacheblend": (3295, 17),
    "integrations/llama_index/llama_index_cacheblend": (3886, 16),
    "integrations/pml/cacheblend_pml": (2843, 10),
    "integrations/ray/cacheblend_ray": (2109, 12),
    "integrations/serve/cacheblend_serve": (3891, 20),
    "integrations/vllm/vllm_cacheblend": (2519, 17),
    "lab/cacheblend_lab": (16809, 109),
    "tests": (40936, 227),
}
"""Most lines and most files of Python below a folder; "tests" are those of all distributions."""

FUNCTIONS = {
    "LlamaIndex, an ingestion": 173,
    "LlamaIndex, a warm query": 147,
    "LangChain, an ingestion": 171,
    "LangChain, a warm query": 161,
}
"""Most functions of ours that `tests.count_functions` finds; of a query, to its first token."""

ROOM = 60
"""A ceiling this many lines above its figure is no ceiling, and is lowered."""


def size(*folders: Path) -> tuple[int, int]:
    """Lines and files of Python below folders."""
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files), len(files)


def sizes(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Lines and files below each folder that has a ceiling."""
    tests = [root / "tests", *root.glob("lab/tests"), *root.glob("integrations/*/tests")]
    return {name: size(*tests) if name == "tests" else size(root / name) for name in LINES}


def unlisted(root: Path = ROOT) -> list[str]:
    """Packages of the core and of the other distributions that have no ceiling."""
    parts = [
        path.parent
        for place in ("cacheblend_rag/*", "*", "lab/*", "integrations/*/*")
        for path in root.glob(f"{place}/__init__.py")
    ]
    return sorted({path.relative_to(root).as_posix() for path in parts} - LINES.keys())


def complaints(found: Mapping[str, tuple[int, int]], ceilings: Mapping[str, tuple[int, int]]) -> list[str]:
    """What is over its ceiling, and which ceilings are too high."""
    said = []
    for name, (lines, files) in found.items():
        most, most_files = ceilings[name]
        if lines > most or files > most_files:
            said.append(
                f"{name}: {lines} lines in {files} files are over its ceiling of {most} in {most_files}; take others out"
            )
        elif most - lines > ROOM or files < most_files:
            said.append(f"{name}: lower its ceiling of {most} lines in {most_files} files to {lines} in {files}")
    return said


def main() -> int:
    """Print the table; return 1 where something is over its ceiling."""
    # Only now: it brings the frameworks.
    from tests.count_functions import functions

    table = Table(title="Ceilings, which only fall")
    for name in ("", "lines", "most", "files", "most "):
        table.add_column(name, justify="right" if name else "left")
    found = sizes()
    for name, (lines, files) in found.items():
        table.add_row(name, f"{lines:,}", f"{LINES[name][0]:,}", str(files), str(LINES[name][1]))
    said = complaints(found, LINES)
    table.add_section()
    table.add_row("functions of ours", "found", "most", "", "")
    for what, names in functions().items():
        table.add_row(what, str(len(names)), str(FUNCTIONS[what]), "", "")
        if len(names) > FUNCTIONS[what]:
            said.append(f"{what} passes {len(names)} functions of ours, over its ceiling of {FUNCTIONS[what]}")
        elif len(names) < FUNCTIONS[what] - 1:
            said.append(f"{what} passes {len(names)} functions of ours: lower its ceiling of {FUNCTIONS[what]} to that")
    console = Console(width=100)
    console.print(table)
    console.print(*said, sep="\n", markup=False)
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
