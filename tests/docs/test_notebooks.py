"""The notebooks under scripts/examples/: their cells run in order, each checks its results, and none has outputs."""

from __future__ import annotations

import json

import pytest

from tests.support.compilers import needs_nvrtc
from tests.support.processes import ROOT

FOLDER = ROOT / "scripts" / "examples"
NAMES = ("attention", pytest.param("emulator", marks=needs_nvrtc))


def code_of(name):
    """Code of each cell of a notebook."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_notebook_is_run():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == ["attention", "emulator"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, capsys):
    namespace = {"__name__": "__main__"}
    for number, code in enumerate(code_of(name)):
        exec(compile(code, f"{name}.ipynb, cell {number}", "exec"), namespace)
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert sum("assert " in code for code in code_of(name)) >= 2


@pytest.mark.parametrize("name", ["attention", "emulator"])
def test_a_notebook_is_stored_without_outputs(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", (
        "as Jupyter saves it"
    )
