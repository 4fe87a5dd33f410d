"""Check that a memory-bound kernel is bound by memory: its machine instructions against the bytes that it moves.

``scripts/inspect_kernels.py`` prints it; with ``--check`` it fails where issuing takes longer than memory.

The main loop counts: the innermost loop with the widest accesses to global memory, or the whole kernel if those are
in no loop. Of the paths through it, the one that moves most is taken, of those the one with the fewest accesses and
calls, and of those the longest: whole vectors, all options, rare cases too. Its instructions keep each pipe busy for
some clocks of a multiprocessor (SM), and its bytes keep memory busy for others, at the boost clock. The share is the
clocks of the busiest pipe divided by those of memory. It does not include latencies, barriers and bank conflicts.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpu_ops.presets import PRESETS, DevicePreset

# The card that kernels are judged on, by the architecture they are compiled for.
CARDS = {"sm_80": "A100-80", "sm_89": "RTX 4090", "sm_90": "H100 SXM", "sm_120": "RTX 5080"}

MEMORY_BOUND = re.compile(
    r"(rms|layer)norm_|norm_dweight|global_norm_blocks|rope|swiglu_|softmax_|dropout|rmsnorm_quant|gemv|gemm_sum"
    r"|column_sums"
    r"|attention_(combine|merge)|attention_backward_(rows|sinks|statistics)|attention_forward\[.*PAGED=1"
    r"|ternary_(pack|unpack|planes|quantize|pad|round|gemv|gemm_sum)|packed_(unpack|quantize|gemv|int8)"
    r"|packed_gemm\[DTYPE=b?f16.*BLOCK_M=32"  # with more tokens tensor cores bound it
)
TWIN = re.compile(r"\[(float|bfloat)\d+")  # Numba kernels, which are written to be read


@dataclass(frozen=True)
class Excuse:
    """Kernel that may take longer than memory, up to ``limit`` times, and the reason."""

    label: str  # regular expression
    arch: str  # regular expression
    limit: float
    reason: str


_ONCE = "weights are quantised once"
EXCUSES = (
    Excuse(r"ternary_quantize_(sums|squares|ranks|runs|encode)", "sm_89|sm_120", 3.3,
           f"GeForce adds 2 doubles per clock and SM; the scale has to be the reference's, and {_ONCE}"),
    Excuse(r"ternary_quantize_(encode|runs)", "sm_80|sm_90", 1.2,
           f"a code takes 10 integer instructions per weight of 16 bits, counting those kept 9 more; {_ONCE}"),
    Excuse(r"ternary_quantize_(count|ranks)", "sm_80|sm_90", 1.3,
           f"each weight finds its bin and its neighbours in rank; {_ONCE}"),
    Excuse(r"dropout\[DTYPE=b?f16", "sm_80|sm_90", 1.35,
           "counts a third draw for 8 elements, where the offset is no multiple of 4, and one for the last elements"),
    Excuse(r"ternary_(quantize|round)_tokens", "sm_89|sm_120", 2.1,
           "doubles, 2 per clock and SM, are in the branch of products near a half: rare"),
    Excuse(r"ternary_gemv\[.*TOKENS=4", "sm_80|sm_90", 1.2, "4 tokens take one dp4a per weight, read once"),
    Excuse(r"gemv\[DTYPE=f32.*TOKENS=16", "sm_80|sm_90", 1.1, "16 tokens take 16 FMAs per weight, read once"),
    Excuse(r"packed_gemv\[DTYPE=b?f16", "sm_80|sm_90", 1.9,
           "a weight takes 5 to 8 instructions for the bits of the unpacked matrix, with int8 activations 1 to 2"),
    Excuse(r"packed_gemv\[DTYPE=f32", "sm_80|sm_90|sm_120", 4.6,
           "FMAs of up to 16 tokens; e4m3 has no table, since 256 values would conflict in banks"),
    Excuse(r"packed_gemm\[", "sm_80|sm_90", 1.6,
           "a weight takes 5 to 8 instructions for the bits of the unpacked matrix, as in packed_gemv"),
    Excuse(r"packed_int8\[.*TOKENS=8", "sm_80|sm_90", 2.2, "8 tokens take 2 dp4a per weight, read once"),
    Excuse(r"packed_int8\[.*SCALE=8.*CODES=kTable", "sm_80|sm_90", 1.25,
           "values as in other tables; a nested scale of 64 weights is looked up, multiplied and added"),
    Excuse(r"packed_int8\[.*CODES=kTable", "sm_80|sm_90", 1.15, "values are looked up by prmt, 8 weights in 13"),
    Excuse(r"packed_quantize", "sm_80|sm_90", 1.35, "blocks of 32: x has a thousandth of the weights' bytes"),
)  # fmt: skip

WARP = 32
ISSUE = 4  # warp instructions per clock and SM
BUTTERFLY = 5  # iterations of a loop over shuffles: 16, 8, 4, 2, 1 lanes apart

# Opcodes that keep each pipe busy (Nsight Compute, "pipelines"), and lanes per clock and SM (CUDA Programming Guide,
# "throughput of native arithmetic instructions"). An instruction may need several. L1 and shared memory move bytes.
PIPES = {
    "fp32": r"FADD|FMUL|FFMA|IMAD|HADD2|HMUL2|HFMA2",
    "imad": r"IMAD",
    "int": r"U?I?ADD3|VIADD|IADD|LOP3|SHF|LEA|ISETP|V?IMNMX|SEL|PRMT|IABS|IDP|I2FP|F2FP|FMNMX|FSEL|FSET|MOV|SGXT|BMSK"
    r"|PLOP3|P2R|R2P|VOTE|VABSDIFF",
    "special": r"MUFU|F2F\b|F2I|I2F\b|I2I|FRND|POPC|FLO|BREV",
    "double": r"D(ADD|MUL|FMA|SETP)|(F2F|F2I|I2F|FRND)\b.*F64|MUFU.*64",
    "tensor": r"HMMA|IMMA",
    "l1": r"LDG|STG|LDS\b|STS\b|LDSM|LDL|STL|ATOM|RED\b|SHFL",
}
LANES = {"imad": 64, "int": 64, "special": 16}
DOUBLE = {"sm_80": 32, "sm_90": 64}  # elsewhere 2
L1_BYTES = 128  # per clock
GLOBAL, SHARED = r"LDG|STG", r"LDS\b|STS\b|LDSM"


@dataclass
class Block:
    """Instructions that run one after the other, and the blocks that may follow."""

    code: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Count:
    """Warp instructions by opcode on the path through the main loop, and the bytes that a warp moves on it."""

    opcodes: Mapping[str, int]
    bytes_moved: int

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())


def count(text: str) -> Count | None:
    """Instructions and bytes of a kernel's main loop; ``None`` if it moves nothing. ``text``: output of nvdisasm."""
    flow = _blocks(text)
    loops, order, back = _loops(flow)
    opcodes = [opcode for at in order for opcode in flow[at].code]
    # If a kernel marks the data that it reads once (evict first), its other loads hit a cache. The main loop of a
    # product on tensor cores is the one that reads that data; its epilogue, which stores wider words, is not.
    marked = any(re.match(r"LDG\b.*\.EF", opcode) for opcode in opcodes)
    is_product = marked and any(re.match(PIPES["tensor"], opcode) for opcode in opcodes)

    def moved(opcode: str) -> int:
        cached = marked and re.match(r"LDG(STS)?\b", opcode) and ".EF" not in opcode
        return WARP * width(opcode) if re.match(GLOBAL, opcode) and not cached else 0

    main_accesses = [o for o in opcodes if moved(o) and (not is_product or ".EF" in o)]
    widest = max(map(width, main_accesses), default=0)
    if not widest:
        return None

    def is_wide(region: Iterable[int]) -> bool:
        return any(width(opcode) == widest and moved(opcode) for at in region for opcode in flow[at].code)

    main = {head: body for head, body in loops.items() if is_wide(body)}
    innermost = [body for head, body in main.items() if not any(h != head and h in body for h in main)]
    times = dict.fromkeys(order, 1)
    for body in loops.values():
        if not is_wide(body) and any(opcode.startswith("SHFL") for at in body for opcode in flow[at].code):
            times.update(dict.fromkeys(body, BUTTERFLY))
    merit = {}
    for at in order:
        code = flow[at].code
        accesses = [o for o in code if re.match(GLOBAL, o)]
        narrow = [o for o in accesses if re.match(r"LDG\b", o) and width(o) < widest]
        useful = [o for o in code if re.match(f"{SHARED}|{GLOBAL}", o) and o not in narrow]
        detours = sum(o.startswith(("CALL", "WARPSYNC.COLLECTIVE")) for o in code)
        merit[at] = sum(map(width, useful)), -len(accesses) - len(narrow) - detours, len(code)
    counts = []
    for body in innermost or [set(order)]:
        taken: collections.Counter[str] = collections.Counter()
        for at in _way(flow, [b for b in order if b in body], back, merit):
            for opcode in flow[at].code:
                taken[opcode] += times[at]
        counts.append(Count(taken, sum(n * moved(opcode) for opcode, n in taken.items())))
    return max(counts, key=lambda counted: counted.bytes_moved)


def width(opcode: str) -> int:
    """Bytes per lane of a load or store."""
    sizes = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}
    return next((sizes[word] for word in opcode.split(".")[:0:-1] if word in sizes), 4)


def clocks(found: Count, card: DevicePreset) -> dict[str, float]:
    """Clocks of an SM for which a warp keeps each pipe and memory busy."""
    arch = card.arch
    lanes = {**LANES, "fp32": arch.fp32_per_sm_clk, "double": DOUBLE.get(arch.name, 2)}
    busy = collections.Counter({"issue": found.instructions / ISSUE})
    for opcode, n in found.opcodes.items():
        for pipe, pattern in PIPES.items():
            if not re.match(pattern, opcode):
                continue
            if pipe == "l1":
                busy[pipe] += n * max(
                    1, WARP * (4 if opcode.startswith("SHFL") else width(opcode)) / L1_BYTES
                )
            elif pipe == "tensor":  # 16 x 8 x 16 of 16 bits, or as many clocks for other types
                busy[pipe] += n * 2048 / arch.fp16_per_sm_clk * card.peaks.float16_acc16 / card.peaks.float16
            else:
                busy[pipe] += n * WARP / lanes[pipe]
    per_clock = card.memory_gbps * 1e9 / (card.sms * card.boost_mhz * 1e6)
    return {**busy, "memory": found.bytes_moved / per_clock}


@dataclass(frozen=True)
class Verdict:
    """Verdict. ``share``: clocks of the busiest pipe / those of memory. ``problem`` is empty if that is allowed."""

    share: float
    pipe: str
    instructions: int
    bytes_moved: int
    problem: str


def judge(label: str, arch: str, text: str) -> Verdict:
    """Judge whether a kernel compiled for one of ``CARDS`` is bound by memory there."""
    counted = count(text)
    if counted is None:
        return Verdict(0, "", 0, 0, "moves nothing to or from global memory that the gate could count")
    busy = clocks(counted, PRESETS[CARDS[arch]])
    memory = busy.pop("memory")
    pipe = max(busy, key=lambda name: busy[name])
    share = busy[pipe] / memory
    excuse = next((e for e in EXCUSES if re.match(e.label, label) and re.fullmatch(e.arch, arch)), None)
    limit = excuse.limit if excuse else 1.0
    problem = ""
    if share > limit:
        problem = f"{pipe} takes {share:.2f} times as long as memory on {CARDS[arch]}, {limit} is allowed: "
        problem += f"{counted.instructions} instructions for {counted.bytes_moved} bytes per warp"
    return Verdict(share, pipe, counted.instructions, counted.bytes_moved, problem)


def judged(labels: Iterable[str], every: bool = False) -> set[str]:
    """Memory-bound kernels; of each op and dtype (or format) the first listed, which has long, aligned rows."""
    first: dict[tuple[str, ...], str] = {}
    for label in labels:
        if not MEMORY_BOUND.match(label) or TWIN.search(label):
            continue
        family = (
            label.partition("[")[0],
            *re.findall(r"\b(?:DTYPE|FORMAT|ACT|OUT|BLOCK|BITS|CODES|TOKENS)=\w+", label),
        )
        first.setdefault((label,) if every else family, label)
    return set(first.values())


def _blocks(text: str) -> list[Block]:
    """Control flow of a kernel's machine code, as ``nvdisasm -c`` prints it; block 0 is the entry."""
    blocks, labels, jumps = [Block()], {}, {}
    falls = True  # whether the last instruction may fall through to the next one

    def begin() -> None:
        if blocks[-1].code:
            if falls:
                blocks[-1].next.append(len(blocks))
            blocks.append(Block())

    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            begin()
            falls = True
            labels[label[1]] = len(blocks) - 1
        elif read := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)(.*);", line):
            guard, opcode, operands = read.groups()
            if blocks[-1].code and re.match("BRA|EXIT|RET", blocks[-1].code[-1]):
                begin()
            blocks[-1].code.append(opcode)
            conditional = guard is not None or re.match(r"\s+!?UP\d", operands) is not None
            falls = conditional or not re.match("BRA|EXIT|RET", opcode)
            if opcode.startswith("BRA") and (target := re.search(r"\.L\w+", operands)):
                jumps[len(blocks) - 1] = target[0]
    for at, name in jumps.items():
        if name in labels:
            blocks[at].next.append(labels[name])
    return blocks


def _loops(flow: list[Block]) -> tuple[dict[int, set[int]], list[int], set[tuple[int, int]]]:
    """Blocks of each loop by its head, all blocks in topological order, and the jumps back to heads."""
    order: list[int] = []
    is_open = {0: True}
    back: set[tuple[int, int]] = set()
    stack = [(0, iter(flow[0].next))]
    while stack:
        at, following = stack[-1]
        successor = next(following, None)
        if successor is None:
            is_open[at] = False
            order.append(at)
            stack.pop()
        elif successor not in is_open:
            is_open[successor] = True
            stack.append((successor, iter(flow[successor].next)))
        elif is_open[successor]:
            back.add((at, successor))
    before = collections.defaultdict(list)
    for at in order:
        for successor in flow[at].next:
            before[successor].append(at)
    loops: dict[int, set[int]] = {}
    for at, head in sorted(back):
        body, todo = loops.setdefault(head, {head}), [at]
        while todo:
            if (block := todo.pop()) not in body:
                body.add(block)
                todo += before[block]
    return loops, order[::-1], back


def _way(
    flow: list[Block],
    region: list[int],
    back: set[tuple[int, int]],
    merit: Mapping[int, tuple[int, int, int]],
) -> list[int]:
    """Path through a region, in topological order, whose blocks' merits have the largest sum."""
    start, inside = region[0], set(region)
    reached: dict[int, tuple[tuple[int, ...], list[int]]] = {start: ((0, 0, 0), [])}
    ends = []
    for at in region:
        so_far, path = reached[at]
        candidate = tuple(map(sum, zip(so_far, merit[at], strict=True))), [*path, at]
        if not flow[at].next or (at, start) in back:
            ends.append(candidate)
        for successor in flow[at].next:
            if successor in inside and (at, successor) not in back:
                reached[successor] = max(reached.get(successor, candidate), candidate)
    return max(ends)[1]
