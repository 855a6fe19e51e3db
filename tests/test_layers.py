"""What imports cost and lead to; which modules may import which is in ``.importlinter``, and checked by ``make lint``."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "cacheblend_rag"
DISTRIBUTIONS = [ROOT, ROOT / "lab", *sorted(file.parent for file in ROOT.glob("integrations/*/pyproject.toml"))]


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


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_no_distribution_ships_a_package_called_integrations(folder: Path) -> None:
    assert not (ROOT / "integrations" / "__init__.py").exists()
    assert 'packages = ["integrations' not in (folder / "pyproject.toml").read_text(encoding="utf-8")


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
