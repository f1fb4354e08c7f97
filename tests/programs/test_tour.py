# SPDX-License-Identifier: Apache-2.0
"""The notebook in examples: what it shows is what it does."""

import os
import re
import sys

import nbformat
import pytest
from docs.refresh_tour import TOUR, executed

PLACES = re.compile(r"(?<![\w.-])/(?:\w+/)+\w+|ipykernel_\d+|\bpid[ =]\d+")
"""Of a machine, or of one run on it."""


def text_of(cell):
    """All that a cell shows, as text."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return "".join(parts)


def cells_of(notebook):
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def test_it_is_stored_as_it_was_run():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    cells = cells_of(notebook)
    assert [cell.execution_count for cell in cells.values()] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells.values() for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert [each.text for each in outputs if each.get("name") == "stderr"] == []
    assert [found[0] for cell in cells.values() for found in PLACES.finditer(text_of(cell))] == []
    holds(cells)


def test_a_reader_can_follow_its_links():
    notebook = nbformat.read(TOUR, as_version=4)
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((\S+?)\)", prose)
    assert links
    assert [link for link in links if not (TOUR.parent / link).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # A Ray of its own, whatever runs on this machine.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    cells = cells_of(executed(TOUR, str(tmp_path)))
    holds(cells)
    assert [
        output.text
        for cell in cells.values()
        for output in cell.outputs
        if output.get("name") == "stderr"
    ] == []


def holds(cells):
    """What the prose of the notebook rests on."""
    shown = {name: text_of(cell) for name, cell in cells.items()}
    assert "1500 samples in an epoch" in shown["train"]
    assert float(re.search(r"accuracy ([\d.]+)%", shown["train"])[1]) > 93
    for pictures in ("curves", "model"):
        assert [output.data["image/png"] != "" for output in cells[pictures].outputs] == [True]
    assert "2 workers against one process: equal" in shown["verify"]
    assert "<table>" in shown["verify"]
    assert "a worker died after step 30" in shown["kill"]
    assert "1 worker went on" in shown["kill"]
    assert "the same bits as undisturbed: True" in shown["kill"]
    assert "the same bits: True" in shown["replay"]
    assert "step 10, shard 1: rank 1, the gradient of " in shown["shadow"]
    assert "[LS101]" in shown["by-hand"]
    assert "[LS101]" in shown["audit"]
    assert "bypassed.py:" in shown["audit"]
    assert "exit code 65" in shown["audit"]
    assert "in lockstep" in shown["mended"]
    assert "exit code 0" in shown["mended"]
