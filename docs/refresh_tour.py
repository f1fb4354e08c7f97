# SPDX-License-Identifier: Apache-2.0
"""Run the notebook in examples, and store it with what a reader would see.

    python docs/refresh_tour.py

A progress bar that is over leaves nothing on the screen, and nothing here. Left out as well is
what is of this machine and this run only: Ray's own lines about processes, times, versions.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).resolve().parents[1] / "examples" / "tour.ipynb"
CELL_TIMEOUT_S = 300
RAYS_OWN_LINE = re.compile(r"^(\x1b\[\d+m)?\(raylet\).*\n", re.MULTILINE)
WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(path: Path, folder: str) -> nbformat.NotebookNode:
    """The notebook at `path`, run from its first to its last cell in `folder`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; what it printed is in the message.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",  # this interpreter's own, if it has ipykernel
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [shown for output in cell.outputs if (shown := _to_keep(output))]
    # Assigned, and not completed: the state of widgets that are gone is in it too.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _to_keep(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    if output.output_type == "stream":
        output.text = RAYS_OWN_LINE.sub("", output.text)
        return output if output.text.strip() else None
    return None if WIDGET in output.get("data", {}) else output


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(TOUR, folder), TOUR)


if __name__ == "__main__":
    main()
