"""Pages of tasks agree with the code: extras, environment variables, arguments of ops, and the list of pages."""

from __future__ import annotations

import inspect
import re
import tomllib

import pytest

import gpu_ops
from gpu_ops.environment import VARIABLES
from scripts.docs import generated, snippets, stage
from tests.support.processes import ROOT

TASKS = stage.PAGES / "tasks"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in TASKS.glob("*.md")}


def first_cells(text):
    """First cells of a text's tables, without the code signs."""
    return [cell.strip().strip("`") for cell in re.findall(r"^\|([^|]*)\|", text, re.M)]


def test_every_page_is_in_a_group():
    tables, _, tree = TEXTS["index"].partition("```{toctree}\n:hidden:\n")
    linked = re.findall(r"\]\((\w+)\.md\)", tables.partition("\n## ")[2])
    assert sorted(linked) == sorted(TEXTS.keys() - {"index"})
    assert tree.strip("`\n").split() == linked, "in the order of the tables"


def test_install_lists_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = first_cells(TEXTS["install"])
    assert [name for name in rows if name in project["optional-dependencies"]] == [
        *project["optional-dependencies"]
    ]


def variables_read():
    """Names of gpu_ops' variables in its code, except for their table."""
    names = set()
    for folder in ("gpu_ops", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "gpu_ops" / "environment.py":
                names |= {*re.findall(r"\bGPU_OPS_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))}
    return names


def test_the_table_of_variables_is_complete():
    table = first_cells(generated.part(["variables"]))[2:]
    assert table == [*VARIABLES]
    assert {name for name in table if name.startswith("GPU_OPS_")} == variables_read()
    assert "<!-- generated: variables -->" in TEXTS["variables"]
    details = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in table if f"`{name}`" not in details] == []


SECTIONS = dict(re.findall(r"^## [^\n]*: `(\w+)`\n(.*?)(?=^## |\Z)", TEXTS["from_torch"], re.M | re.S))


def arguments(section):
    """Arguments that a section's tables name in their second column."""
    rows = re.findall(r"^\|.*\|([^|]*)\|$", section, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)=[^`]*`", row)}


@pytest.mark.parametrize("op", SECTIONS)
def test_arguments_that_take_the_place_of_others_exist(op):
    others = {"attention_decode": gpu_ops.rope_append_kv}
    known = {*inspect.signature(getattr(gpu_ops, op)).parameters}
    known |= {*inspect.signature(others[op]).parameters} if op in others else set()
    assert arguments(SECTIONS[op]) <= known


def test_the_sections_of_from_torch():
    assert list(SECTIONS) == [
        *("attention", "attention_varlen", "attention_decode", "rmsnorm", "layernorm", "swiglu"),
        *("cross_entropy", "linear", "adamw_step"),
    ]
    assert all(arguments(section) for section in SECTIONS.values())


@pytest.mark.parametrize(
    ("page", "outputs"),
    [
        ("from_torch", ["True False", "attention: unknown argument 'is_causal'; here it is 'causal'"]),
        ("variables", ["reference numba"]),
    ],
)
def test_output_of_a_page(page, outputs):
    assert snippets.run_page(TEXTS[page], f"{page}.md") == outputs


def test_questions_are_short():
    answers = re.split(r"^\*\*(.*?)\*\*", TEXTS["questions"], flags=re.M)[1:]
    assert len(answers) >= 20
    assert all(question.endswith("?") for question in answers[::2])
    assert all(len(answer.strip().splitlines()) <= 4 for answer in answers[1::2])
