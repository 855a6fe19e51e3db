"""Take what depends on whose machine it was out of the notebooks of ``examples/``, once nbmake has run them."""

from pathlib import Path

import nbformat

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# PEFT and bitsandbytes are here for the tests alone; loaded together, they say what they have no kernels for.
_OF_TESTS_ALONE = "Failed to load CPU gemm_4bit_forward"

for path in (Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"):
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not each.get("text", "").startswith(_OF_TESTS_ALONE)]
    nbformat.write(notebook, path)
