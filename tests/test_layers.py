"""Imports run downwards only: no upward import, no circle, no framework in the engine, no reaching below the engine from outside.

The rules are read off the syntax tree, so an import inside a function or under ``if TYPE_CHECKING`` counts like any other.
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "cacheblend_rag"

# The modules and packages of `cacheblend_rag` by the floor they stand on. Each may import from its own floor and those below.
FLOORS: dict[int, tuple[str, ...]] = {
    0: (
        "errors",
        "extras",
        "files",
        "config",
        "tuning",
        "chunk",
        "keys",
        "report",
        "trace",
        "stops",
        "thoughts",
        "preamble",
        "lexer",
    ),
    1: ("kv", "rope", "reading", "selection", "layout", "codec"),
    2: ("store", "model"),
    3: ("companions", "encode", "loader", "fuse", "metrics", "prompt", "prefixes"),
    4: ("engine",),
    5: ("documents", "chat", "cli"),
}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules}
ENGINE_FLOOR = FLOOR_OF["engine"]

# What measures the core, and trains; its commands are found by their entry points.
LAB = "cacheblend_lab"

# Distributions that the engine, and all below it, must never know of.
FRAMEWORKS = ("llama_index", "langchain", "langgraph", "langsmith", "chromadb", "sentence_transformers")

# What a framework package may import of `cacheblend_rag`, besides the package itself.
DOOR = ("engine", "chat", *FLOORS[0])
# What else of it some need: attachments watch a forward, vLLM moves KV itself, servers cut documents, commands share options,
# names that machines share are the store's.
WORKSHOPS = {
    "cacheblend_attachments": tuple("cli documents fuse layout model selection store".split()),
    "cacheblend_pml": ("cli",),
    "cacheblend_serve": ("documents", "cli", "layout", "store"),
    "cacheblend_ray": ("documents", "cli", "store", "reading"),
    "cacheblend_gguf": tuple("encode fuse kv model prefixes selection store".split()),
    "cacheblend_hybrid": tuple("codec fuse kv model prefixes prompt reading selection store".split()),
    "vllm_cacheblend": ("kv", "prompt", "layout", "rope", "store", "model", "encode", "loader"),
}
# Which distributions they build on.
ON_TOP_OF = {
    "cacheblend_serve": {"cacheblend_attachments"},
    **{
        name: {"cacheblend_attachments", "cacheblend_serve", "cacheblend_pml"}
        for name in ("llama_index_cacheblend", "langchain_cacheblend")
    },
    "cacheblend_ray": {"cacheblend_serve"},
    "vllm_cacheblend": {"cacheblend_serve"},
}
INTEGRATIONS = {file.parent.name: file.parent for file in sorted(ROOT.glob("integrations/*/*/__init__.py"))}


class Import(NamedTuple):
    """One name imported by one file: the dotted module that holds it, and where the statement stands."""

    module: str
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def dotted(file: Path, folder: Path) -> str:
    """``folder/store/ram.py`` -> ``folder.store.ram``; a package is named by its folder."""
    parts = [folder.name, *file.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_in(folder: Path) -> dict[str, Path]:
    """Every module under a package folder, by its dotted name."""
    return {dotted(file, folder): file for file in sorted(folder.rglob("*.py"))}


def imports_of(file: Path, name: str, known: dict[str, Path]) -> Iterator[Import]:
    """Every import in a file, at any depth; ``from package import submodule`` names the submodule."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, file, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1])
                source = f"{base}.{source}" if source else base
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield Import(submodule if submodule in known else source, file, node.lineno)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield Import(str(node.args[0].value), file, node.lineno)  # type: ignore[attr-defined]


def every_import(modules: dict[str, Path], others: dict[str, Path] | None = None) -> Iterator[Import]:
    """Every import in these modules, of each other and of others."""
    for name, file in modules.items():
        yield from imports_of(file, name, modules | (others or {}))


def _is_import_call(call: ast.Call) -> bool:
    """``importlib.import_module("literal")`` and ``__import__("literal")`` are imports too."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("import_module", "__import__") or not call.args:
        return False
    return isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)


def part_of(module: str) -> str:
    """``cacheblend_rag.store.ram`` -> ``store``; the package itself -> an empty string."""
    return module.split(".")[1] if "." in module else ""


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def unlisted(known: dict[str, Path]) -> list[str]:
    parts = {part_of(name) for name in known} - {""}
    return sorted(parts - FLOOR_OF.keys())


def upward(known: dict[str, Path]) -> list[str]:
    """Imports from a higher floor, and imports of the package itself from the engine's floor and below."""
    found = []
    for name, file in known.items():
        floor = FLOOR_OF.get(part_of(name))
        if floor is None:  # the package's own __init__, or a module that `unlisted` reports
            continue
        for each in imports_of(file, name, known):
            if not is_under(each.module, PACKAGE):
                continue
            target = part_of(each.module)
            if not target and floor <= ENGINE_FLOOR:
                found.append(f"{each}: floor {floor} imports the package itself, which stands above the engine")
            elif target and FLOOR_OF.get(target, floor) > floor:
                found.append(f"{each}: floor {floor} imports from floor {FLOOR_OF[target]}")
    return found


def circles(known: dict[str, Path]) -> list[str]:
    """Circles among the modules, each as the path around it."""
    graph = {
        name: sorted({i.module for i in imports_of(file, name, known)} & known.keys()) for name, file in known.items()
    }
    found: list[str] = []
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            path.append(name)
            for target in graph[name]:
                visit(target)
            path.pop()
            done.add(name)

    for name in graph:
        visit(name)
    return found


def framework_imports(known: dict[str, Path]) -> list[str]:
    return [
        str(each)
        for name, file in known.items()
        if FLOOR_OF.get(part_of(name), 0) <= ENGINE_FLOOR
        for each in imports_of(file, name, known)
        if each.module.split(".")[0].startswith(FRAMEWORKS)
    ]


def below_the_engine(known: dict[str, Path], core: dict[str, Path], door: tuple[str, ...] = DOOR) -> list[str]:
    allowed = [f"{PACKAGE}.{part}" for part in door]
    return [
        str(each)
        for each in every_import(known, core)
        if is_under(each.module, PACKAGE)
        and each.module != PACKAGE
        and not any(is_under(each.module, part) for part in allowed)
    ]


CORE = modules_in(ROOT / PACKAGE)


def test_every_module_stands_on_a_floor() -> None:
    missing = unlisted(CORE)
    assert not missing, f"not on any floor: {missing}; add each to FLOORS and to ARCHITECTURE.md"


def test_no_upward_import() -> None:
    found = upward(CORE)
    assert not found, "\n".join(["imports run downwards only:", *found])


def test_no_circle() -> None:
    found = circles(CORE)
    assert not found, "\n".join(["modules import each other in a circle:", *found])


def test_the_engine_knows_no_framework() -> None:
    found = framework_imports(CORE)
    assert not found, "\n".join(["only floor 5 and integrations/ may import a framework:", *found])


def test_the_core_knows_nothing_of_what_is_built_on_it() -> None:
    above = {LAB, *INTEGRATIONS}
    found = [str(each) for each in every_import(CORE) if each.module.partition(".")[0] in above]
    assert not found, "\n".join(["the core may not import what is built on it:", *found])
    assert not circles(modules_in(ROOT / "lab" / LAB))


def test_the_package_itself_only_re_exports() -> None:
    stub = ROOT / PACKAGE / "__init__.pyi"
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = all(isinstance(target, ast.Name) and target.id in ("__all__", "__version__") for target in targets)
        assert named or isinstance(node, ast.ImportFrom), f"{stub}:{node.lineno} is more than a re-export"
    package = importlib.import_module(PACKAGE)
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_the_command_answers_without_the_model_libraries() -> None:
    libraries = {"torch", "transformers", "chromadb", "sentence_transformers"}
    code = f"import sys, cacheblend_rag.cli; print(*{libraries} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_framework_package_stays_above_the_engine(integration: str) -> None:
    modules = modules_in(INTEGRATIONS[integration])
    door = DOOR + WORKSHOPS.get(integration, ())
    found = below_the_engine(modules, CORE, door)
    assert not found, "\n".join([f"{integration} may import {PACKAGE} and {', '.join(door)} of it:", *found])
    others = INTEGRATIONS.keys() - {integration} - ON_TOP_OF.get(integration, set())
    mixed = [str(each) for each in every_import(modules) if each.module.split(".")[0] in others]
    assert not mixed, "\n".join(["the integrations do not know each other:", *mixed])
    assert not circles(modules)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "lab", *(folder.parent for folder in INTEGRATIONS.values())])
def test_no_distribution_ships_a_package_called_integrations(folder: Path) -> None:
    assert not (ROOT / "integrations" / "__init__.py").exists()
    assert 'packages = ["integrations' not in (folder / "pyproject.toml").read_text(encoding="utf-8")


# The rules themselves, on packages that break them.


def tree(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    """A package `cacheblend_rag` with these files, and empty ``__init__.py`` where one is missing."""
    root = folder / PACKAGE
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (directory / "__init__.py").touch()
    return modules_in(root)


UPWARD = [
    "from cacheblend_rag.engine import BlendEngine",
    "from cacheblend_rag import engine",
    "import cacheblend_rag.engine",
    "from ..engine import BlendEngine",
    "from .. import engine",
    "def f():\n    from cacheblend_rag.engine import BlendEngine",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..engine import BlendEngine",
    "import importlib\nimportlib.import_module('cacheblend_rag.engine')",
    "from cacheblend_rag import BlendEngine",
]
DOWNWARD = ["from ..kv import KV", "from .base import KVStore", "from .. import errors", "import torch"]
FRAMEWORK = "import chromadb\nfrom llama_index.core import Document\nfrom langchain_core import documents"


def test_the_rules_find_what_breaks_them(tmp_path: Path) -> None:
    for number, statement in enumerate([*UPWARD, *DOWNWARD]):
        files = {"kv.py": "", "errors.py": "", "engine.py": "", "store/base.py": "", "store/ram.py": statement}
        known = tree(tmp_path / str(number), files)
        assert len(upward(known)) == (statement in UPWARD), statement
        assert unlisted(known) == circles(known) == []
    # Each file breaks another rule.
    init, ram = "from .ram import R", "def f():\n from cacheblend_rag.store import R"
    files = {"store/__init__.py": init, "store/ram.py": ram, "engine/door.py": FRAMEWORK, "cli/run.py": FRAMEWORK}
    known = tree(tmp_path, {**files, "helpers/strings.py": ""})
    assert circles(known) == ["cacheblend_rag.store -> cacheblend_rag.store.ram -> cacheblend_rag.store"]
    assert unlisted(known) == ["helpers"]
    assert len(framework_imports(known)) == 3
    below = ["from cacheblend_rag.store.ram import R", "from cacheblend_rag import store"]
    outside = tree(tmp_path / "outside", {"llm.py": "\n".join([*UPWARD[:2], *below])})
    assert [line.split(":")[1].split()[0] for line in below_the_engine(outside, known)] == ["3", "4"]


def test_a_module_can_be_the_first_to_be_imported() -> None:
    """What commands bring in by their entry points must not lead back to who imports them."""
    code = """
import sys
for module in ("cacheblend_rag.cli.output", "cacheblend_lab.cli.bench", "cacheblend_lab.bench.shapes"):
    __import__(module)
    for name in [name for name in sys.modules if name.startswith("cacheblend")]:
        del sys.modules[name]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
