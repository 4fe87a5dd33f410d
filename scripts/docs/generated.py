"""Parts of pages generated from the code: public names, lists of files, tables of kernels and of runs."""

from __future__ import annotations

import html
import importlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.docs import drawings_attention, drawings_rows, kernel_parts, result_parts

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = Path(__file__).resolve().parent / "pages"

MODULES = (
    "gpu_ops.models",
    "gpu_ops.inference",
    "gpu_ops.training",
    "gpu_ops.memory",
    "gpu_ops.distributed",
    "gpu_ops.emulator",
    "gpu_ops.presets",
    "gpu_ops.errors",
)
SECTIONS = {  # of the sidebar, in order; the first page is the list of the others
    "Tasks": "tasks/index",
    "API": "api/index",
    "Kernels": "kernels/index",
    "Emulator": "emulator",
    "Performance": "performance/index",
    "Numerics": "numerics",
    "Internals": "internals",
    "Contributing": "contributing",
    "Changelog": "changelog",
}


def part(words: list[str]) -> str:
    """Markdown for ``<!-- generated: NAME ARGUMENTS -->``."""
    return PARTS[words[0]](*words[1:])


def api(*names: str) -> str:
    """Descriptions of names of ``gpu_ops``, from their docstrings."""
    return described("gpu_ops", names)


def described(module: str, names: Iterable[str]) -> str:
    imported = importlib.import_module(module)
    return "\n\n".join(
        f"```{{eval-rst}}\n{directive(module, name, getattr(imported, name))}\n```" for name in names
    )


def directive(module: str, name: str, thing: object) -> str:
    if inspect.isclass(thing):
        return f".. autoclass:: {module}.{name}\n   :members:" + "\n   :show-inheritance:" * issubclass(
            thing, Exception
        )
    if callable(thing):
        return f".. autofunction:: {module}.{name}"
    return f".. py:data:: {name}\n   :module: {module}\n\n   {CONSTANTS[name]}"


def where(room: str, op: str) -> str:
    """Folders of an op's room, and its benchmark."""
    folders = {
        "public functions": f"gpu_ops/ops/{room}",
        "definitions (NumPy)": f"reference/{room}",
        "lowering, CUDA C++": f"kernels/{room}",
        "Numba, GPU": f"kernels/{room}/numba_cuda",
        "Numba, CPU": f"kernels/{room}/cpu",
        "tests": f"tests/{room}",
        "benchmark": f"perf/bench_{op}.py",
    }
    rows = [f"| {title} | `{path}` |" for title, path in folders.items() if (ROOT / path).exists()]
    return "\n".join(["| | where |", "|---|---|", *rows])


OPS = {
    "Attention": ("attention", "attention_varlen", "attention_decode", "attention_merge", "block_mask"),
    "Positions": ("rope", "rope_scaling", "rope_append_kv"),
    "Norms and activations": ("rmsnorm", "layernorm", "rmsnorm_quant_int8", "softmax", "swiglu", "dropout"),
    "Layers": ("linear", "swiglu_mlp", "embedding"),
    "Loss, optimiser, sampling": (
        "cross_entropy",
        "linear_cross_entropy",
        "global_norm",
        "adamw_step",
        "sample",
    ),
    "Ternary": ("ternary_quantize", "ternary_pack", "ternary_matmul", "ternary_layers", "files"),
    "What runs": ("running",),
}

KERNELS = (
    *(
        "attention_forward",
        "attention_decode",
        "attention_backward",
        "norm",
        "rmsnorm_quant",
        "rope",
        "rope_append_kv",
    ),
    *("softmax", "swiglu", "matmul", "embedding", "dropout", "cross_entropy", "optimizer", "sample"),
    *("ternary_formats", "ternary_matmul", "ternary_backward"),
)
CONSTANTS = {  # a dict has no docstring
    "POLICIES": "What each policy of recomputation keeps of a layer: names of fields of :class:`Saved`.",
    "ARCHES": "Limits of each architecture, by name: ``sm_80``.",
    "PRESETS": "Rows by name.",
}


def contents(name: str) -> str:
    """List of the pages below a page, appended to it."""
    if name == "index":
        entries = "\n".join(f"{title} <{page}>" for title, page in SECTIONS.items())
        return f"\n\n```{{toctree}}\n:hidden:\n\nStart <self>\n{entries}\n```\n"
    if name == "kernels/index":
        rows = [f"| [{heading('kernels', n)}]({n}.md) |" for n in KERNELS]
        hidden = "```{toctree}\n:hidden:\n\n" + "\n".join(KERNELS) + "\n```"
        return "\n".join(["\n## Kernels one by one\n", "| page |", "|---|", *rows, "", hidden, ""])
    return ""


def drawing(name: str) -> str:
    """Drawing as part of its page, with the colours of the theme; the caption is its function's docstring."""
    module = drawings_attention if hasattr(drawings_attention, name) else drawings_rows
    function = getattr(module, name)
    caption = html.escape(" ".join(inspect.getdoc(function).split()))
    drawn = function().svg().replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
    return f'```{{raw}} html\n<figure class="drawing">{drawn}<figcaption>{caption}</figcaption></figure>\n```'


def pages() -> dict[str, str]:
    """Fully generated pages: one for each public module."""
    return {f"api/{module.rpartition('.')[2]}": module_page(module) for module in MODULES}


def module_page(module: str) -> str:
    imported = importlib.import_module(module)
    text = inspect.getdoc(imported) or ""
    head = f"```{{eval-rst}}\n.. py:module:: {module}\n\n" + text + "\n```"
    names = [n for n in imported.__all__ if n != "__version__"]
    functions = [n for n in names if inspect.isfunction(getattr(imported, n))]
    classes = [n for n in names if inspect.isclass(getattr(imported, n))]
    others = [n for n in names if n not in functions and n not in classes]
    parts = [f"# {module}", head]
    for title, group in (("Functions", functions), ("Classes", classes), ("Constants", others)):
        if group:
            parts += [f"## {title}", described(module, group)]
    return "\n\n".join(parts) + "\n"


def ops() -> str:
    """Pages of ops in the order of a transformer's layer, with their first paragraphs."""
    rows = ["| | |", "|---|---|"]
    names = [name for group in OPS.values() for name in group]
    assert sorted(names) == sorted(p.stem for p in (PAGES / "api").glob("*.md") if p.stem != "index")
    parts = []
    for title, group in OPS.items():
        rows = [f"| [{heading('api', n)}]({n}.md) | {lead(n)} |" for n in group]
        parts.append("\n".join([f"### {title}", "", "| page | what it is |", "|---|---|", *rows]))
    hidden = "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```"
    return "\n\n".join([*parts, hidden])


def heading(folder: str, name: str) -> str:
    return (PAGES / folder / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def lead(name: str) -> str:
    """First paragraph of a page."""
    return (PAGES / "api" / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ")


def modules() -> str:
    """Pages of the public modules, with the first line of their docstrings."""
    rows = ["| module | what it is |", "|---|---|"]
    names = []
    for module in MODULES:
        name = module.rpartition(".")[2]
        names.append(f"{module} <{name}>")
        first = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n")[0]
        rows.append(f"| [`{module}`]({name}.md) | {first} |")
    return "\n".join(rows) + "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```"


PARTS: dict[str, Callable[..., str]] = {
    "api": api,
    "where": where,
    "drawing": drawing,
    "modules": modules,
    "ops": ops,
    "kernels": kernel_parts.kernels,
    "tiles": kernel_parts.tiles,
    "cards": kernel_parts.cards,
    "results": result_parts.results,
    "pictures": result_parts.pictures,
}
compile_kernels = kernel_parts.compile_kernels
