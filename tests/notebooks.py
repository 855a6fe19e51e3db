"""Run the notebooks of ``examples/``, each in a fresh kernel, and keep what they show: ``python -m tests.notebooks``."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.font_manager  # noqa: F401  # a kernel that had to make its cache would say so
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What does not depend on whose machine it was.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    # Shown, where errors would also stop the kernel's own code. tqdm misses a package that only its progress bars need.
    "PYTHONWARNINGS": "default,ignore:IProgress not found",
}
# PEFT and bitsandbytes are here for the tests alone; loaded together, they say what they have no kernels for.
_OF_TESTS_ALONE = "Failed to load CPU gemm_4bit_forward"


def executed(path: Path) -> NotebookNode:
    """Return a notebook as it is after all of its cells have run, in the folder that it lies in."""
    notebook = nbformat.read(path, as_version=4)
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith("CACHEBLEND_")}
    # Nobody's profile, startup files and history.
    with TemporaryDirectory() as profile:
        client = NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True)
        client.execute(cwd=str(path.parent), env=own | _ENVIRONMENT | {"IPYTHONDIR": profile})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if outputs := cell.get("outputs"):
            cell.outputs = [each for each in outputs if not each.get("text", "").startswith(_OF_TESTS_ALONE)]
    return notebook


def main() -> None:
    for path in NOTEBOOKS:
        print(path.name, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
