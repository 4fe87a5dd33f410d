"""Documentation site: every public name and kernel has a page, and faults of a page are found."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from types import SimpleNamespace

import pytest

import gpu_ops
from scripts.docs import build, drawings_attention, drawings_rows, generated, snippets, stage
from tests.support.compilers import needs_nvrtc
from tests.support.processes import ROOT

PAGES = sorted(stage.PAGES.rglob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
CONTENT = "\n".join(TEXTS.values())


def words_of(part):
    """Arguments of every ``<!-- generated: part ... -->`` in all pages."""
    return [
        word for words in re.findall(rf"<!-- generated: {part} (.*?) -->", CONTENT) for word in words.split()
    ]


def test_every_name_of_gpu_ops_is_on_one_page():
    named = words_of("api")
    assert sorted(named) == sorted(set(gpu_ops.__all__) - {"__version__", "errors"})


def test_every_public_module_has_a_page():
    """Public modules are packages that export names, and modules that are themselves public."""
    packages = {f"gpu_ops.{path.parent.name}" for path in (ROOT / "gpu_ops").glob("*/__init__.py")}
    public = {name for name in packages if getattr(importlib.import_module(name), "__all__", ())}
    assert public - {"gpu_ops.kernels", "gpu_ops.reference"} <= set(generated.MODULES)
    pages = generated.pages()
    for module in generated.MODULES:
        text = pages[f"api/{module.rpartition('.')[2]}"]
        missing = [
            n for n in importlib.import_module(module).__all__ if not re.search(rf":: (.*\.)?{n}\n", text)
        ]
        assert missing == []


def test_every_kernel_has_a_page():
    assert sorted(words_of("kernels")) == sorted(
        f"{path.parent.name}/{path.stem}" for path in (ROOT / "kernels").glob("*/*.cu")
    )
    assert sorted(generated.KERNELS) == sorted(path.stem for path in stage.PAGES.glob("kernels/*.md"))


def test_the_variants_of_a_page_are_those_that_run():
    typical = list(generated.typical())
    assert {v.kernel.stem for v in typical} >= {"norm/norm", "attention/forward_sm80", "weights/ternary_gemv"}
    assert any("bf16" in dict(v.kernel.defines).values() for v in typical)
    assert len(typical) < 150, "a build has to compile them all"


def test_every_drawing_is_on_a_page():
    drawn = {
        name: function
        for module in (drawings_attention, drawings_rows)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }
    assert set(words_of("drawing")) == set(drawn)
    for name, function in drawn.items():
        drawing = function()
        right = [
            float(x) + float(w)
            for x, w in re.findall(r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', drawing.svg())
        ]
        assert max(right) <= drawing.width, name
        assert function.__doc__


def test_pages_have_no_broken_links(tmp_path):
    faults = stage.stage(tmp_path / "pages", run=False)
    assert faults == []
    assert "<!-- generated" not in (tmp_path / "pages" / "kernels" / "norm.md").read_text(encoding="utf-8")


def test_a_broken_link_of_a_page_is_found(tmp_path):
    site = stage.Stage(tmp_path)
    site.write(
        "tasks/new",
        "[one](no_such_page.md), [two](memory.md), `scripts/docs.sh`",
        stage.PAGES / "tasks" / "new.md",
    )
    assert site.problems == ["scripts/docs/pages/tasks/new.md: link to no_such_page.md, which does not exist"]
    assert (
        '<a class="source" href="../source/scripts/docs.sh.html">'
        in (tmp_path / "tasks" / "new.md").read_text()
    )
    assert site.sources == {"scripts/docs.sh"}


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.html#there", ""),
        ("other.html#gone", "page.html: link to other.html#gone, which has no such anchor"),
        ("gone.html", "page.html: link to gone.html, which does not exist"),
        ("../outside.html", "page.html: link to ../outside.html, which does not exist"),
        ("https://example.org/x", ""),
    ],
)
def test_a_broken_link_of_the_site_is_found(tmp_path, link, problem):
    (tmp_path / "page.html").write_text(f'<a href="{link}">x</a>')
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    assert build.broken(tmp_path) == [problem] * bool(problem)


def page(*blocks):
    return "\n\n".join(f"```{first}\n{code}\n```" for first, code in blocks) + "\n"


def test_blocks_of_a_page_run_in_one_namespace():
    reads = "print(x * 3, Path('m.txt').read_text())"
    text = page(
        ("python run", "from pathlib import Path\nx = 2"),
        ("python file=m.txt", "y"),
        ("python run", reads),
        ("sh run lines=1", "seq 2"),
    )
    outputs = snippets.run_page(text, "page.md")
    assert outputs == ["", "", "6 y", "1\n..."]
    shown = snippets.shown(text, "page.md", outputs)
    assert "```python\nfrom pathlib import Path\nx = 2\n```" in shown
    assert "*m.txt*" in shown
    assert ":class: output\n\n6 y\n```" in shown


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (("python run", "x = 1\nx / 0"), r"page.md:2: [\s\S]*ZeroDivisionError"),
        (("sh run", "echo before; exit 3"), r"page.md:2: exit code 3\nbefore"),
        (("python", "x = 1"), r"page.md:1: a block must say run"),
        (("python run quick", "x = 1"), r"page.md:1: a block must say run"),
    ],
)
def test_a_failing_block_is_found(block, message):
    with pytest.raises(snippets.SnippetError, match=message):
        snippets.run_page(page(block), "page.md")


def test_a_failing_block_fails_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PAGES", tmp_path)
    bad = tmp_path / "bad.md"
    bad.write_text(page(("python run", "print('first')"), ("python run", "print(1 / 0)")))
    text, problem = stage.page_text(bad, run=True)
    assert "ZeroDivisionError" in problem
    assert problem.startswith("bad.md:6: ")
    assert ":class: output\n\nfirst\n" in text  # the rest of the page is present
    assert "print(1 / 0)" in text
    assert stage.page_text(bad, run=False)[1] == ""


def test_a_block_that_never_ends_is_named(tmp_path, monkeypatch):
    """The processes that it has started end, too."""
    monkeypatch.setattr(stage, "PAGES", tmp_path)
    monkeypatch.setattr(stage, "TIMEOUT", 5.0)
    late = tmp_path / "late.md"
    late.write_text(page(("sh run", "sleep 1000 & wait")))
    text, problem = stage.page_text(late, run=True)
    assert problem == "late.md:2: not done 5.0 s after the page began"
    assert "sleep 1000" in text


def test_the_rest_is_built_and_the_exit_status_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build.stage, "stage", lambda folder, run: ["page.md:2: it failed"])
    monkeypatch.setattr(build, "sphinx", lambda arguments: 0)
    monkeypatch.setattr(build, "broken", lambda folder: ["page.html: a broken link"])
    assert build.main([str(tmp_path / "site")]) == 1
    printed = capsys.readouterr()
    assert printed.err == "docs: page.md:2: it failed\ndocs: page.html: a broken link\n"
    assert "Sphinx builds the site" in printed.out


def test_a_result_of_another_machine_has_a_table():
    table = generated.part(["results"])
    assert table.count("\n## ") + table.startswith("## ") == len(
        list((ROOT / "perf" / "results").glob("*/*.csv"))
    )
    assert "None" not in table


def test_the_table_of_finetuning(monkeypatch):
    monkeypatch.setattr(generated, "TUNED", ("llama-3-8b",))
    monkeypatch.setattr(generated, "TUNED_ON", ("RTX 5080",))
    monkeypatch.setattr(generated, "TUNING_PLANS", [])
    assert generated.part(["tuning"]) == ""
    generated.plan_tuning()
    rows = [row.strip("| ").split(" | ") for row in generated.part(["tuning"]).splitlines()]
    assert rows[0][-1] == "tokens, RTX 5080, 16 GB"
    assert rows[2:] == [
        ["llama-3-8b", "bfloat16", "16.6 GiB, 17.8 GB", "no"],
        ["llama-3-8b", "q8_0", "10.5 GiB, 11.3 GB", "12,470"],
        ["llama-3-8b", "nf4", "7.2 GiB, 7.8 GB", "20,074"],
        ["llama-3-8b", "nf4_nested", "7.0 GiB, 7.5 GB", "20,749"],
    ]


def test_names_without_a_description_are_found():
    extension = pytest.importorskip(
        "scripts.docs.extension", reason="needs the docs extra", exc_type=ImportError
    )
    missing = set(extension.undescribed(set()))
    assert {"gpu_ops.attention", "gpu_ops.models.load", "gpu_ops.inference.PagedKVCache.reserve"} <= missing
    assert list(extension.undescribed(missing)) == []


def test_errors_become_links():
    extension = pytest.importorskip(
        "scripts.docs.extension", reason="needs the docs extra", exc_type=ImportError
    )
    lines = [
        "Raises",
        "------",
        "ShapeError",
        "    Why.",
        "DTypeError, OSError",
        "",
        "Notes",
        "-----",
        "Text",
    ]
    extension.link_errors(SimpleNamespace(), "function", "f", None, None, lines)
    assert lines == [
        *("Errors", "------", ":class:`~gpu_ops.errors.ShapeError`", "    Why.", ""),
        *(":class:`~gpu_ops.errors.DTypeError`, :class:`OSError`", "", "Notes", "-----", "Text"),
    ]


@pytest.mark.peers
@pytest.mark.parametrize("package", ["torch", "jax"])
def test_the_page_about_another_library(package):
    pytest.importorskip(package)
    text = TEXTS[stage.PAGES / "tasks" / f"{package}.md"]
    printed = snippets.run_page(text, f"{package}.md", needs=package)
    assert printed == snippets.promised(text, f"{package}.md")
    assert "True" in "".join(printed)


# Pages under scripts/docs/pages/tasks print the output in their text.


@functools.cache
def printed_by(page):
    """Output of a page's blocks. A failing block raises."""
    text = (stage.PAGES / "tasks" / f"{page}.md").read_text(encoding="utf-8")
    return "\n".join(snippets.run_page(text, f"{page}.md"))


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("attention", ["True 32 MiB of scores", "True\nTrue False", "runs on"]),
        ("decoder_layer", ["\nTrue\n", "layer  keeps   32 KiB"]),
        ("model_folder", ["config.json model.safetensors", "b'class ", "there is no 'model.layers.2."]),
        ("resume", ["states after [4, 8]", "same weights: True"]),
        ("lora", ["has changed: False", "the same loss: True"]),
    ],
)
def test_page(page, words):
    printed = printed_by(page)
    assert [w for w in words if w not in printed] == []


def test_a_run_resumes_with_the_same_losses():
    losses = re.findall(r"^batch (8|9), loss ([\d.]+)", printed_by("resume"), re.M)
    assert len(losses) == 4
    assert losses[:2] == losses[2:]


def test_adapters_lower_the_loss_and_merge():
    printed = printed_by("lora")
    before, after = map(float, re.search(r"pages: ([\d.]+), adapted ([\d.]+)", printed).groups())
    assert after < before - 0.1
    adapted, merged = map(float, re.search(r"adapters ([\d.]+), merged ([\d.]+)", printed).groups())
    assert merged == pytest.approx(adapted, abs=2e-4)


def test_a_gradient_is_the_change_of_the_loss():
    change, expected = map(float, re.findall(r"-?\d+\.\d{3}", printed_by("decoder_layer")))
    assert change == pytest.approx(expected, rel=0.01)


def test_ternary_training_loses_less_than_rounding():
    printed = printed_by("bitnet")
    single, rounded = map(
        float, re.search(r"float32 ([\d.]+), rounded to ternary ([\d.]+)", printed).groups()
    )
    (trained,) = map(float, re.findall(r"trained as ternary ([\d.]+)", printed))
    assert abs(trained - single) < 0.05 < rounded - single
    assert re.findall(r"2\.00 bits per weight, loss ([\d.]+)", printed) == [f"{trained:.2f}"]


@needs_nvrtc
def test_each_step_of_a_kernel_gains_what_the_page_says():
    printed = printed_by("write_kernel")
    assert "272.03" in printed
    assert "shared-memory race" in printed
    steps = ("naive", "online", "tiles", "padded", "vectors")
    counts = {
        s: [int(n.replace(",", "")) for n in re.findall(rf"^  {s} +([\d,]+)", printed, re.M)] for s in steps
    }
    sectors, requests, replays, instructions = zip(*counts.values(), strict=True)
    assert sectors[0] > 30 * sectors[1] > 300 * sectors[2]
    assert sectors[2:] == sectors[2:3] * 3
    assert requests[0] > 2 * requests[1] > 80 * requests[2]
    assert [r > 0 for r in replays] == [False, False, True, False, False]
    assert instructions[4] < 0.8 * instructions[3]
