"""Instructions in an iteration of attention's main loop besides tensor-core ones, per exp2, without a GPU.

    python scripts/inspect_loops.py                             attention, all architectures
    python scripts/inspect_loops.py --kernel bfloat16 --arch sm_80

They are counted in machine code, along one iteration of the loop that holds both products and the softmax. Of the
paths through it, the one that copies most is taken, and of those the shortest. That is a tile that every row sees
whole, that is not the last, and that does not raise the maxima: it skips comparisons with the mask, and the rescaling
that the first tiles of a row need. ``NOP`` is inserted by ptxas between tensor-core instructions from sm_100 on.
Needs nvdisasm: ``pip install nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Iterator, Sequence

from gpu_ops.kernels.compiler import jit, toolkit
from gpu_ops.kernels.compiler.kernel import short_label
from scripts.inspect_kernels import PRESET_ARCHES, sass

CLASSES = {
    "tensor": r"HMMA",
    "loads": r"LDSM|LDGSTS|LDS\b|LDG\b",
    "exp2": r"MUFU\.EX2",
    "softmax": r"FFMA|FMNMX|FADD|FMUL|F2FP",
    "padding": r"NOP",
}

# predicated, opcode, jump target, address in shared memory that it copies to
Instruction = tuple[bool, str, str, str]


def iterations(text: str) -> Iterator[dict[str, float]]:
    """Instructions per exp2, by class and ``rest``, of each innermost loop with tensor-core instructions and exp2."""
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            guard, opcode, operands = match.groups()
            target = re.search(r"\.L\w+", operands) if opcode.startswith("BRA") else None
            conditional = (
                guard is not None
                or opcode.startswith("BRA.DIV")  # taken by a warp that has diverged
                or re.match(r"\s+!?UP\d", operands) is not None
            )
            copied = operands.split()[0] if opcode.startswith("LDGSTS") else ""
            code.append((conditional, opcode, target[0] if target else "", copied))
    # Code of diverged warps is at the end and jumps back: these are no loops.
    end = min(
        (labels[jump] for _, opcode, jump, _ in code if opcode.startswith("BRA.DIV")), default=len(code)
    )
    loops = [(labels[jump], i) for i, (_, _, jump, _) in enumerate(code[:end]) if jump and labels[jump] <= i]
    loops = [
        (a, b)
        for a, b in loops
        if all(any(re.match(CLASSES[c], op) for _, op, *_ in code[a:b]) for c in ("tensor", "exp2"))
    ]
    for a, b in loops:
        if any((a, b) != (c, d) and a <= c and d <= b for c, d in loops):
            continue
        opcodes = _path(code, labels, a, b)
        counts = collections.Counter(
            next((name for name, pattern in CLASSES.items() if re.match(pattern, opcode)), "rest")
            for opcode in opcodes
        )
        yield {name: counts[name] / counts["exp2"] for name in (*CLASSES, "rest")}


def _path(code: list[Instruction], labels: dict[str, int], first: int, last: int) -> list[str]:
    """Opcodes from ``first`` to the jump back at ``last``, on the path that copies most and is then the shortest."""
    # What has been copied on the path to an instruction, and the shortest such path.
    ways: dict[int, dict[frozenset[str], list[str]]] = {first: {frozenset(): []}}
    complete: dict[frozenset[str], list[str]] = {}
    for i in range(first, last + 1):
        conditional, opcode, target, copied = code[i]
        back = i == last or (target != "" and labels[target] == first and not conditional)
        nexts = [] if opcode.startswith(("BRA", "EXIT")) and not conditional else [i + 1]
        if target and i < labels[target] <= last:
            nexts.append(labels[target])
        for copies, path in ways.pop(i, {}).items():
            now, extended = copies | {copied} if copied else copies, [*path, opcode]
            for reached in [complete] if back else [ways.setdefault(n, {}) for n in nexts]:
                if now not in reached or len(extended) < len(reached[now]):
                    reached[now] = extended
    return complete[max(complete, key=lambda copies: (len(copies), -len(complete[copies])))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", nargs="+", default=PRESET_ARCHES, help="such as sm_80 sm_90a; default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    options = parser.parse_args(arguments)
    if toolkit.tool("nvdisasm") is None:
        missing = "no nvdisasm, which lists machine code: pip install nvidia-cuda-nvdisasm"
        print(f"inspect_loops: {missing}", file=sys.stderr)
        return 1
    counted = 0
    for arch in options.arch:
        for variant in jit.all_variants(arch):
            label = variant.kernel.label
            short = short_label(label)
            chosen = options.kernel in label or options.kernel in short
            if not label.startswith("attention_forward") or not chosen:
                continue
            compiled = jit.assemble(jit.compile_kernel(variant.kernel, arch), arch)
            assert compiled.cubin is not None
            for counts in iterations(sass(compiled.cubin, compiled.entry)):
                counted += 1
                print(arch, short, " ".join(f"{name} {n:.2f}" for name, n in counts.items()), flush=True)
    if not counted:
        named = f" whose name contains {options.kernel!r}" if options.kernel else ""
        print(f"inspect_loops: no loop found in an attention kernel{named}", file=sys.stderr)
    return 0 if counted else 1


if __name__ == "__main__":
    raise SystemExit(main())
