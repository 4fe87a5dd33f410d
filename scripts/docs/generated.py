"""Parts of pages generated from the code: public names, lists of files, tables of kernels and of runs."""

from __future__ import annotations

import html
import importlib
import inspect
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gpu_ops import memory, models
from gpu_ops.cli.preset_report import card_limits
from gpu_ops.core.checks import FLOAT_DTYPES
from gpu_ops.core.op import op_named
from gpu_ops.environment import VARIABLES
from gpu_ops.errors import OutOfMemoryError
from gpu_ops.kernels.compiler import jit
from gpu_ops.kernels.compiler.kernel import CudaKernel, short_label
from gpu_ops.kernels.program import Launch, lower
from gpu_ops.presets import PRESETS
from perf import runs
from perf.machine import label
from perf.pictures import draw_all
from scripts import inspect_kernels
from scripts.docs import drawings_attention, drawings_rows

ROOT = Path(__file__).resolve().parent.parent.parent

ARCH = "sm_90"  # architecture of the tables, that of the card that the kernels have run on
MOST = 2  # variants of one entry in a table
KERNEL_SOURCES = ROOT / "kernels"
RESOURCES: dict[str, list[inspect_kernels.KernelReport]] = {}


def kernels(*stems: str) -> str:
    """Head and resource table of each source file."""
    return "\n\n".join(f"### {stem}.cu\n\n{head(stem)}\n\n{resources(stem)}" for stem in stems)


def head(stem: str) -> str:
    """Comment at the top of a source file: formula, shapes, memory layout, macros."""
    lines = (KERNEL_SOURCES / f"{stem}.cu").read_text(encoding="utf-8").splitlines()
    comment = [
        line[2:].removeprefix(" ") for line in itertools.takewhile(lambda x: x.startswith("//"), lines)
    ]
    text = "\n".join(comment)
    return f"`kernels/{stem}.cu` begins with\n\n```text\n{text}\n```"


def resources(stem: str) -> str:
    """Registers, shared memory and occupancy of typical variants, as compiled for this build."""
    rows = RESOURCES.get(stem, [])
    if not rows:
        return ""
    table = [
        f"Compiled for {ARCH}:\n",
        "| kernel | threads | registers | spilled | shared memory | blocks per SM | occupancy | limited by |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        shared = (row.static_shared or 0) + (row.dynamic_shared or 0)
        cells = (
            short_label(row.kernel),
            str(row.threads),
            str(row.registers),
            f"{row.spill_bytes} B",
            f"{shared / 1024:.3g} KiB" if shared else "0",
            str(row.blocks_per_sm),
            f"{row.occupancy or 0:.0%}",
            row.limiter,
        )
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def compile_all_kernels() -> None:
    """Compile the variants of the tables; a cached kernel costs milliseconds."""
    tasks = [(variant, ARCH) for variant in typical()]
    for (variant, _), row in zip(
        tasks, inspect_kernels.inspect_all(tasks, False, set(), Console(stderr=True)), strict=True
    ):
        assert isinstance(variant.kernel, CudaKernel)
        RESOURCES.setdefault(variant.kernel.stem, []).append(row)


def typical() -> Iterator[jit.Variant]:
    """A few variants of each entry, bfloat16 first."""
    groups: dict[tuple[str, str], list[jit.Variant]] = {}
    for variant in jit.all_variants(ARCH):
        if isinstance(variant.kernel, CudaKernel):
            groups.setdefault((variant.kernel.stem, variant.kernel.entry), []).append(variant)
    for variants in groups.values():
        limit = 3 * MOST if variants[0].kernel.entry == "attention_forward" else MOST
        by_preference = sorted(variants, key=lambda v: "bf16" not in dict(v.kernel.defines).values())  # type: ignore[union-attr]
        yield from by_preference[:limit]


def tiles() -> str:
    """Tile of attention on every card, by head_dim, as ``select_config`` chooses it; no card is needed."""
    head_dims = (64, 128, 256)
    rows = [
        "| card | " + " | ".join(f"head_dim {d}" for d in head_dims) + " |",
        "|---|" + "--:|" * len(head_dims),
    ]
    for preset in PRESETS.values():
        if preset.generic or preset.arch.compute_capability < (8, 0):
            continue
        cells = [attention_tile(d, card_limits(preset)) for d in head_dims]
        rows.append(f"| {preset.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def attention_tile(head_dim: int, limits: Any) -> str:
    q, kv = (np.empty((1, 4096, heads, head_dim), FLOAT_DTYPES["bfloat16"]) for heads in (32, 8))
    bound = op_named("docs", "attention").binder(q, kv, kv, causal=True, device="emulator", backend="raw")
    program, _ = lower(bound.spec, "raw", limits)
    launch = next(step for step in program.steps if isinstance(step, Launch))
    made: dict[str, Any] = dict(launch.kernel.defines)  # type: ignore[union-attr]
    tile = f"{made['BLOCK_M']} x {made['BLOCK_N']}, {made['WARPS_M']} x {made['WARPS_N']} warps"
    return f"{tile}, {launch.shared / 1024:.3g} KiB"


def cards() -> str:
    """Presets: the figures that tiles are chosen by."""
    rows = [
        "| card | | SMs | shared memory per block | L2 | GB/s | TFLOPS, 16 bit | source |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for p in PRESETS.values():
        if not p.generic:
            sizes = f"{p.arch.smem_per_block_optin >> 10} KiB | {p.l2_bytes >> 20} MiB"
            speeds = f"{p.memory_gbps:g} | {p.peaks.float16:g}"
            rows.append(f"| {p.name} | {p.arch.name} | {p.sms} | {sizes} | {speeds} | {p.source} |")
    return "\n".join(rows)


TUNED = ("llama-3.2-3b", "mistral-7b", "llama-3-8b", "llama-2-13b", "llama-3-70b")  # models of the table
TUNED_ON = ("RTX 5080", "RTX 4090")  # cards, of 16 and 24 GB
TUNING: dict[str, Any] = {"dtype": "bfloat16", "policy": "layer", "batch": 1}
TUNING_PLANS: list[str] = []


def plan_tuning() -> None:
    """Plan adapters of rank 16 on bases in four forms; a minute in all."""
    TUNING_PLANS.clear()
    for name, format in itertools.product(TUNED, (None, "q8_0", "nf4", "nf4_nested")):
        config, weights = models.PRESETS[name], memory.Weights(format, rank=16)
        peak = memory.estimate(config, seqlen=2048, device=TUNED_ON[-1], weights=weights, **TUNING).peak
        lengths = [longest_text(config, card, weights) for card in TUNED_ON]
        sizes = f"{peak / 2**30:.1f} GiB, {peak / 1e9:.1f} GB"
        TUNING_PLANS.append(f"| {name} | {format or 'bfloat16'} | {sizes} | {' | '.join(lengths)} |")


def longest_text(config: models.LlamaConfig, card: str, weights: memory.Weights) -> str:
    """Largest seqlen that a card can train."""
    try:
        return f"{memory.fit(config, card, train=True, weights=weights, **TUNING):,}"
    except OutOfMemoryError:
        return "no"


def tuning() -> str:
    """Table of :func:`plan_tuning`."""
    if not TUNING_PLANS:
        return ""
    titles = [f"tokens, {name}, {PRESETS[name].memory_gb:g} GB" for name in TUNED_ON]
    head = f"| model | base | memory of 2,048 tokens | {' | '.join(titles)} |"
    return "\n".join([head, "|---|---|--:|" + "--:|" * len(TUNED_ON), *TUNING_PLANS])


PICTURES = ROOT / "build" / "pictures"  # drawn by the build, from perf/results


def results() -> str:
    """Tables of all saved runs, newest first."""
    saved = [
        (path, runs.load(path))
        for path in (ROOT / "perf" / "results").glob("*/*.csv")
        if path.parent.name != "local"
    ]
    saved.sort(key=lambda pair: pair[1].facts["created"], reverse=True)
    return "\n\n".join(table(path, run) for path, run in saved)


def table(path: Path, run: runs.Run) -> str:
    facts = run.facts
    versions = facts["machine"]["versions"]
    peers = f"torch {versions['torch']}" if "torch" in versions else "no torch"
    rows = [
        "| op | | shape | dtype | time | rate | of the limit | x NumPy | x torch |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    rows += [f"| {' | '.join(cells(row))} |" for row in run.rows if "ours_median" in row]
    head = f"## {label(facts['machine'])}, {facts['created'][:10]}"
    source = f"Commit {facts['machine']['commit']}, {peers}; `{path.relative_to(ROOT)}`."
    return "\n".join([head, "", source, "", *rows])


def cells(row: dict[str, Any]) -> list[str]:
    """Cells of one case. The rate is in the unit of its limit."""
    seconds = row["ours_median"]
    if row.get("limited_by") == "matmul":
        rate = f"{row['flops'] / seconds / 1e12:.3g} TFLOPS"
    else:
        rate = f"{row['bytes'] / seconds / 1e9:.3g} GB/s"
    share = f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else ""
    ratios = [f"{row[name]:.2g}" if name in row else "" for name in ("times_naive", "times_torch")]
    return [
        f"`{row['op']}`",
        row["name"],
        row["shape"],
        row["dtype"],
        duration(seconds),
        rate,
        share,
        *ratios,
    ]


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def draw_pictures() -> None:
    """Draw all saved runs, with matplotlib."""
    shutil.rmtree(PICTURES, ignore_errors=True)
    for _ in draw_all([ROOT / "perf" / "results"], PICTURES, general=True):
        pass


def pictures(*words: str) -> str:
    """Pictures that :func:`draw_pictures` drew and whose names contain one of the words."""
    paths = sorted(PICTURES.rglob("*.svg"))
    chosen = [path for path in paths if any(word in path.stem for word in words)]
    return "\n\n".join(
        f"![{path.stem.replace('-', ' ').replace('_', ' ')}](/{path.relative_to(ROOT)})" for path in chosen
    )


PAGES = Path(__file__).resolve().parent / "pages"

MODULES = (
    "gpu_ops.compat",
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
    "Packed weights": ("quantize",),
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
    *("packed_weights", "ternary_formats", "ternary_matmul", "ternary_backward"),
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


def variables() -> str:
    """Environment variables and their effects."""
    rows = [f"| `{name}` | {effect} |" for name, effect in VARIABLES.items()]
    return "\n".join(["| variable | effect |", "|---|---|", *rows])


PARTS: dict[str, Callable[..., str]] = {
    "api": api,
    "where": where,
    "drawing": drawing,
    "modules": modules,
    "ops": ops,
    "kernels": kernels,
    "tiles": tiles,
    "cards": cards,
    "tuning": tuning,
    "results": results,
    "pictures": pictures,
    "variables": variables,
}
compile_kernels = compile_all_kernels
