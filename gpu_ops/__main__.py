"""Command ``python -m gpu_ops``: shows devices and backends of this machine. ``warmup`` compiles kernels ahead,
``presets`` shows cards, ``memory`` estimates the memory of a model, ``generate`` runs one, ``quantize`` makes a GGUF
file of one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_ops import __version__
from gpu_ops.cli.terminal import make_console, print_table, run_command, waiting
from gpu_ops.environment import VARIABLES, Environment, environment
from gpu_ops.kernels.compiler.progress import several

_DESCRIPTION = "Transformer kernels for arrays. Without a command: devices, backends, versions, caches."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_ops", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"gpu_ops {__version__}")
    parser.add_argument("--json", action="store_true", help="the environment as JSON, for a bug report")
    commands = parser.add_subparsers(dest="command")
    ahead = commands.add_parser("warmup", help="compile every CPU kernel now, so that no first call waits")
    ahead.add_argument("--jobs", type=_positive, help="processes that compile (default: one per core)")
    ahead.add_argument("--dtype", action="append", help="only variants of this dtype; may be repeated")
    ahead.add_argument("--kernel", action="append", help="only kernels named like this; may be repeated")
    cards = commands.add_parser("presets", help="the cards, or what each kernel would use on one of them")
    cards.add_argument("card", nargs="?", help='such as H200, "RTX 4090" or sm_86')
    kept = commands.add_parser("cache", help="what is kept of compiled kernels, and where")
    kept.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=("all", "old"),
        help="remove it: all, or what was made of sources that have changed since",
    )
    _add_generate(commands.add_parser("generate", help="text from a model's folder or GGUF file"))
    _add_quantize(commands.add_parser("quantize", help="a model's folder as a GGUF file for llama.cpp"))
    _add_memory(commands.add_parser("memory", help="what a model takes, by term, and which cards have room"))
    options = parser.parse_args(argv)
    if options.command == "generate":
        from gpu_ops.inference.command import run

        return run(options)
    if options.command == "quantize":
        from gpu_ops.cli.quantize import run as quantize

        return quantize(options)
    if options.command == "memory":
        return memory(options)
    if options.command == "presets":
        return presets(options.card)
    if options.command == "cache":
        return show_cache(options.clear)
    if options.command == "warmup":
        return warmup(options.jobs, options.kernel or [], options.dtype or [])
    report = environment()
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, make_console())
    return 0


def _add_generate(text: argparse.ArgumentParser) -> None:
    text.add_argument(
        "--model",
        required=True,
        help="folder with config.json, *.safetensors, tokenizer.json; or a GGUF file",
    )
    text.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; default: that beside the model")
    text.add_argument(
        "--prompt", action="append", required=True, help="may be repeated; - reads standard input"
    )
    text.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    text.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    text.add_argument("--top-k", type=int, default=0, metavar="K")
    text.add_argument("--top-p", type=float, default=1.0, metavar="P")
    text.add_argument("--seed", type=int, default=0)
    text.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    text.add_argument("--dtype", help="such as bfloat16; default: that of the files")
    text.add_argument("--format", help="pack the projections as they are read, such as q8_0, q4_k or nf4")
    text.add_argument(
        "--activations",
        choices=("native", "int8"),
        help="of products with packed weights: exact (native, the default), or 1.5 to 3 times as fast (int8)",
    )
    text.add_argument("--kv-dtype", help="of the cache: int8 or float8_e4m3fn; default: that of the weights")
    text.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


def _add_quantize(file: argparse.ArgumentParser) -> None:
    file.add_argument(
        "--model", required=True, help="folder with config.json, *.safetensors and tokenizer.json"
    )
    file.add_argument(
        "--format",
        default="q4_k_m",
        help="q4_k_m (the default), q4_k_s, q5_k_m, q5_k_s, q6_k, q8_0, q4_0, q5_0, iq4_nl, f16, bf16, ...",
    )
    file.add_argument("-o", "--output", required=True, metavar="FILE", help="the GGUF file to write")


def _add_memory(of_model: argparse.ArgumentParser) -> None:
    of_model.add_argument("--model", help="a folder, a config.json, or a name such as llama-3-8b")
    of_model.add_argument("--batch", default="1", help="sequences (default 1)")
    of_model.add_argument("--seqlen", default="4096", help="tokens of each (default 4096)")
    of_model.add_argument("--dtype", default="bf16", help="bf16 (the default), fp16, fp32 or fp64")
    of_model.add_argument("--kv-dtype", help="of the KV cache, int8 and float8_e4m3fn too; default: dtype")
    of_model.add_argument("--train", action="store_true", help="a training step with AdamW, not inference")
    of_model.add_argument("--policy", default="none", help="what layers keep in training: none, ..., layer")
    of_model.add_argument(
        "--format", help="of packed projections, such as nf4, q4_k or q8_0; default: arrays"
    )
    of_model.add_argument(
        "--pack-tables", action="store_true", help="pack embedding table and output layer too"
    )
    of_model.add_argument("--rank", help="of LoRA adapters: only these are trained")
    of_model.add_argument(
        "--projections", help="with adapters: qkv,o,gate_up,down (the default) or some of them"
    )
    of_model.add_argument("--card", help='only this one, such as H200 or "RTX 4090"')


def memory(options: argparse.Namespace) -> int:
    """Print the memory of a model; return 1 if no card has room, 2 with a line on stderr for invalid arguments."""
    from dataclasses import fields

    from gpu_ops.cli.memory_report import Question, show_memory
    from gpu_ops.errors import GpuOpsError

    try:
        asked = Question(**{f.name: getattr(options, f.name) for f in fields(Question)})
        return show_memory(asked, make_console())
    except GpuOpsError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def presets(card: str | None) -> int:
    """Print all presets, or one with the kernels that typical calls would launch; return 1 if there is none."""
    from gpu_ops.cli.preset_report import show_card, show_cards
    from gpu_ops.errors import OptionError

    console = make_console()
    try:
        show_card(card, console) if card else show_cards(console)
    except OptionError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    return 0


def show_cache(clear: str | None) -> int:
    """Print the cache folder and its contents, after clearing it if requested; return 1 if it cannot be used."""
    from gpu_ops.kernels.compiler import cache

    console = make_console()
    problem = cache.folder_problem()
    if problem is not None:
        console.print(f"[red]the kernel cache is not used[/]: {escape(problem)}", highlight=False)
        return 1
    files = cache.contents()
    if clear is not None:
        count, nbytes = cache.clear(f for f in files if f.old or clear == "all")
        console.print(f"{several(count, 'file')} removed, {nbytes / 2**20:.1f} MiB", highlight=False)
        files = cache.contents()
    table = _table(f"kept in {escape(str(cache.root()))}")
    for label in dict.fromkeys(f.kind for f in files):
        group = [f for f in files if f.kind == label]
        old = sum(f.old for f in group)
        size = f"{sum(f.nbytes for f in group) / 2**20:.1f} MiB"
        table.add_row(label, str(len(group)), size, f"{old} of sources that have changed" if old else "")
    if not files:
        table.add_row("nothing")
    print_table(console, table)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def show(found: Environment, console: Console) -> None:
    """Print the environment as tables."""
    memory = f"{found.cpu.memory_bytes / 2**30:.0f} GiB"
    devices = _table("devices")
    devices.add_row("cpu", escape(found.cpu.model), f"{several(found.cpu.threads, 'thread')}, {memory}")
    for card in found.cuda_devices:
        arch = "sm_{}{}".format(*card.compute_capability)
        facts = f"{arch}, {card.memory_bytes / 2**30:.0f} GiB, preset {card.preset or 'none: too old'}"
        devices.add_row(f"cuda {card.index}", escape(card.name), facts)
    if found.cuda_missing:
        devices.add_row("cuda", "[yellow]none[/]", escape(found.cuda_missing))
    if found.driver:
        devices.add_row("driver", escape(found.driver), "")
    devices.add_row("preset", found.preset or "none", escape(found.preset_reason))
    print_table(console, devices)

    backends = _table("backends, best first")
    for row in found.backends:
        state = "[green]ready[/]" if row.missing is None else f"[yellow]no[/]: {escape(row.missing)}"
        backends.add_row(row.device, row.backend, state)
    print_table(console, backends)

    for title, pairs in (
        ("versions", found.versions),
        ("compiled kernels are kept in", found.caches),
    ):
        table = _table(title)
        for name, value in pairs.items():
            table.add_row(name, escape(value))
        print_table(console, table)
    table = _table("environment variables")
    for name in dict.fromkeys((*VARIABLES, *found.variables)):
        table.add_row(
            name, escape(found.variables.get(name, "")) or "[dim]not set[/]", VARIABLES.get(name, "")
        )
    print_table(console, table)


def _table(title: str) -> Table:
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None, "padding": (0, 2)}
    return Table(title=title, show_header=False, **look)


def warmup(jobs: int | None, kernels: list[str], dtypes: list[str]) -> int:
    """Compile the chosen variants in parallel processes, with a line for each; return 1 if one fails."""
    from gpu_ops.cli.warmup import variants
    from gpu_ops.environment import cache_folder
    from gpu_ops.errors import DeviceError

    console = make_console()
    try:
        with waiting(console, "looking for kernels"):
            listed = variants()
    except DeviceError as error:  # Numba's compiler is turned off
        console.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 1
    labels = [
        label
        for label, parts in listed.items()
        if (not kernels or any(word in label for word in kernels))
        and (not dtypes or any(word in parts for word in dtypes))
    ]
    if not labels:
        console.print("no kernel matches; without --kernel and --dtype all are compiled")
        return 1
    folder = cache_folder()
    if folder is None:
        console.print("[red]no cache folder is writable[/]: set GPU_OPS_CACHE_DIR to one that is")
        return 1
    start = time.perf_counter()
    workers = min(jobs or environment().cpu.threads, len(labels))
    console.print(
        f"compiling {several(len(labels), 'kernel')}, {workers} at a time; each takes up to half a minute"
    )
    console.file.flush()
    failed = _compile_all(labels, workers, console)
    seconds = time.perf_counter() - start
    console.print(
        f"{len(labels) - failed} of {several(len(labels), 'kernel')} ready in {seconds:.0f} s: {folder}"
    )
    return 1 if failed else 0


def _compile_all(labels: list[str], workers: int, console: Console) -> int:
    """Print a line for each compiled kernel, and on a terminal a bar; return the number of failures."""
    from concurrent.futures import as_completed

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from gpu_ops.cli.warmup import compile_variant, in_processes
    from gpu_ops.kernels.compiler.kernel import short_label

    failed = 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with in_processes(workers, compile_variant, [(label,) for label in labels]) as futures, bar:
        task = bar.add_task("", total=len(labels))
        running = dict(zip(futures, map(short_label, labels), strict=True))
        for count, done in enumerate(as_completed(running), 1):
            error = done.exception()
            failed += error is not None
            came = f"{done.result():.1f} s" if error is None else f"FAILED, {type(error).__name__}: {error}"
            style = None if error is None else "red"
            line = f"{count:{len(str(len(labels)))}} of {len(labels)}  {running[done]}: {came}"
            console.print(line, style=style, markup=False, highlight=False)
            console.file.flush()
            bar.advance(task)
    return failed


if __name__ == "__main__":
    run_command(main)
