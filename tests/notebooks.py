"""Take what depends on whose machine it was out of the notebooks of ``examples/``, once nbmake has run them."""

from pathlib import Path

import nbformat

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Warnings tell of what is installed here, the packages that only tests need among it.
for path in (Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"):
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    nbformat.write(notebook, path)
