"""Runs the notebooks beside this file and keeps what they print: `make notebooks`."""

import re
import tempfile
from pathlib import Path

import nbclient
import nbformat

for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:  # a progress bar that is done leaves an empty one
            cell.outputs = [output for output in cell.outputs if output.get("data") != {"text/plain": ""}]
    # A kernel names its cells after files in a temporary folder.
    text = re.sub(r"/[^\s<>\"']*ipykernel_\d+/\d+\.py", "cell.py", nbformat.writes(notebook))
    path.write_text(text + "\n")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
