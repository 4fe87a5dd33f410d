"""Steps of ``wmma``: loads and stores of the fragments of a tile. The product has a step like that of ``mma``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpu_ops.emulator import aot, undefined
from gpu_ops.emulator.access import locate
from gpu_ops.emulator.batch import WARP, Mask
from gpu_ops.emulator.instructions import Unknown, matrix
from gpu_ops.emulator.memory import GENERIC, SPACES, Access
from gpu_ops.emulator.registers import Builder, address, parts, reader, writer
from gpu_ops.emulator.state import ReadyStep, State
from gpu_ops.emulator.syntax import Array, Instruction, Name, Operand
from gpu_ops.emulator.warp_ops import collective, product


class _Tile:
    """Memory of a fragment, for ``wmma.load.a.sync.aligned.row.m16n16k16.shared.f16`` and ``store``."""

    def __init__(
        self, m: State, pc: int, instruction: Instruction, where: Operand, rest: list[Operand]
    ) -> None:
        action, operand, *words, shape_and_type = instruction.modifiers
        layout, shape, *spaces = (w for w in words if w not in ("sync", "aligned"))
        if layout not in ("row", "col") or len(spaces) > 1:
            raise Unknown(instruction.form)
        space = SPACES[spaces[0].partition("::")[0]] if spaces else GENERIC
        self.m, self.fragment = m, matrix.fragment(operand, shape, shape_and_type)
        self.along = self.fragment.is_along(layout)
        self.base = address(m, instruction, where)
        self.leading = reader(m, instruction, rest[0], "u32") if rest else None
        self.default = self.fragment.leading(layout)
        size = self.fragment.word if self.along else self.fragment.bits // 8
        self.bits = np.dtype(f"u{size}")
        load = action == "load"
        self.access = Access(pc, space, size, read=load, write=not load, tracked=load)

    def pieces(self, register: int) -> Iterator[tuple[int, Array]]:
        """Pieces of a register that one access moves each, as (shift in the register, address for each thread)."""
        m, f = self.m, self.fragment
        rows, columns = (np.tile(x, m.threads // WARP) for x in f.place(register))
        leading = np.array([self.default]) if self.leading is None else self.leading().astype(np.int64)
        for e in range(1 if self.along else f.per_word):
            offset = rows * leading + columns if self.along else (columns + e) * leading + rows
            yield e * f.bits, self.base() + (offset * f.bits // 8).astype(np.uint64)


def _load(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    target, source, *rest = instruction.operands
    tile = _Tile(m, pc, instruction, source, rest)
    f = tile.fragment
    writers = [writer(m, instruction, part, f"b{8 * f.word}") for part in parts(target)]
    if len(writers) != f.registers:
        raise instruction.error(f"{instruction.form} wants {f.registers} registers")
    word = np.dtype(f"u{f.word}")
    registers = [m.index[part.name] for part in parts(target) if isinstance(part, Name)]

    def run(here: Array, named: Array, mask: Mask) -> None:
        values = []
        for register in range(f.count):
            value = np.zeros(m.threads, word)
            for shift, where in tile.pieces(register):
                place = locate(m, tile.access, mask, where)
                out = np.zeros((1, m.threads), tile.bits)
                aot.gather(place.host, place.lanes, out)
                value |= out[0].astype(word) << word.type(shift)
                if m.sanitizer is not None and m.sanitizer.absent:
                    undefined.loaded(m, [registers[register :: f.count]], tile.bits.itemsize)
            values.append(value)
        for k, write in enumerate(writers):
            write(values[k % f.count], mask)

    return collective(m, pc, None, run)


def _store(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    target, source, *rest = instruction.operands
    tile = _Tile(m, pc, instruction, target, rest)
    f = tile.fragment
    readers = [reader(m, instruction, part, f"b{8 * f.word}") for part in parts(source)]
    if len(readers) != f.registers:
        raise instruction.error(f"{instruction.form} wants {f.registers} registers")

    registers = [m.index[part.name] for part in parts(source) if isinstance(part, Name)]

    def run(here: Array, named: Array, mask: Mask) -> None:
        for register, read in enumerate(readers):
            value = np.broadcast_to(read(), m.threads)
            for shift, where in tile.pieces(register):
                piece = np.ascontiguousarray((value >> value.dtype.type(shift)).astype(tile.bits)[np.newaxis])
                place = locate(m, tile.access, mask, where, piece)
                if m.undefined:
                    undefined.stored(m, pc, place, [registers[register]], tile.bits.itemsize, shift)
                aot.scatter(place.host, place.lanes, piece)

    return collective(m, pc, None, run)


def _wmma(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    action = instruction.modifiers[0]
    if action == "mma":
        return product(m, pc, instruction, matrix.wmma_mma(instruction.modifiers))
    if action not in ("load", "store"):
        raise Unknown(instruction.form)
    return (_load if action == "load" else _store)(m, pc, instruction)


BUILDERS: dict[str, Builder] = {"wmma": _wmma}
