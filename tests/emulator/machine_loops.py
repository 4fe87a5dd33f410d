"""Instructions that the main loop of a kernel issues, from its machine code."""

from __future__ import annotations

import collections
import re

import pytest

from gpu_ops.kernels.compiler import jit, toolkit
from scripts.inspect_kernels import sass

# Machine instructions that the integer units issue, at 64 lanes per clock of an SM; IMAD has separate units.
INTEGER = {"LOP3", "IDP", "IADD3", "IADD", "VIADD", "ISETP", "SHF", "LEA", "IMNMX", "VIMNMX", "SEL", "PRMT"}


def loop(kernel, arch, opcode, least):
    """Instructions by opcode of the shortest loop with ``least`` of ``opcode``, from its label to the branch back."""
    if toolkit.tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    compiled = jit.assemble(jit.compile_kernel(kernel, arch), arch)
    opcodes, labels, branches = [], {}, []
    for line in sass(compiled.cubin, compiled.entry).splitlines():
        if match := re.match(r"(\.L\S+):", line):
            labels[match.group(1)] = len(opcodes)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            if match.group(1).startswith("BRA") and (target := re.search(r"\.L\w+", match.group(2))):
                branches.append((len(opcodes), target.group()))
            opcodes.append(match.group(1))
    loops = [opcodes[labels[name] : at + 1] for at, name in branches if labels.get(name, at + 1) <= at]
    match = min((x for x in loops if sum(o.startswith(opcode) for o in x) >= least), key=len)
    return collections.Counter(name.partition(".")[0] for name in match)
