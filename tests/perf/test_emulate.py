"""Counts that ``python -m perf --device emulator`` prints."""

from __future__ import annotations

import os
from functools import partial
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from gpu_ops import emulator
from gpu_ops.errors import DeviceError
from gpu_ops.kernels.compiler import toolkit
from perf import cli, emulate
from perf.case import Case
from perf.emulate import CAPTION
from tests.support.programs import SOURCE

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

ROWS, COLUMNS = 32, 256


def case(name, ours, **changes):
    """Case whose call launches a kernel of emulator/profile.cu; ``bytes``: x read and y written once."""
    fields = {
        "op": "test",
        "shape": f"{ROWS} x {COLUMNS}",
        "dtype": "float32",
        "flops": 1.0,
        "bytes": 2.0 * 4 * ROWS * COLUMNS,
        "make": lambda rng: {n: np.ones((ROWS, COLUMNS), np.float32) for n in "xy"},
        "make_small": None,
        "reference": None,
    }
    return Case(name=name, ours=ours, **{**fields, **changes})


def strided(inputs, stride=1):
    # The number of loads is the same for any stride; with stride 2, half of them are of the same elements.
    blocks = ROWS * COLUMNS // 128 // stride
    args = (inputs["x"], inputs["y"], stride)
    return partial(emulator.launch, SOURCE, "strided", blocks, 128, args, arch="sm_86")


def two_passes(inputs):
    weight = np.ones(COLUMNS, np.float32)
    args = (inputs["x"], weight, inputs["y"], COLUMNS)
    return partial(emulator.launch, SOURCE, "two_passes", ROWS, 64, args)


def printed(planned):
    out, environment = StringIO(), dict(os.environ)
    code = emulate.run(planned, Console(file=out, width=1000, color_system=None))
    assert os.environ == environment, "later launches of the process keep their sanitizer"
    return code, out.getvalue()


def test_traffic_against_the_least():
    (copy,) = emulate.launches(case("copy", strided))
    assert copy.once == copy.uncached == 1
    (strided_launch,) = emulate.launches(case("every other", partial(strided, stride=2)))
    assert strided_launch.once == 0.75  # all sectors of x, half of those of y
    (twice,) = emulate.launches(case("two passes", two_passes))
    weight = 1 / (2 * ROWS)
    assert twice.once == 1 + weight
    assert twice.uncached == 1.5 + weight


def test_preparation_does_not_count():
    def ours(inputs):
        strided(inputs)()
        return strided(inputs)

    assert len(list(emulate.launches(case("copy", ours)))) == 1


def test_both_backends_are_shown():
    both = list(emulate.launches(case("copy", strided, numba=partial(strided, stride=2))))
    assert [launch.label for launch in both] == ["strided", "strided, Numba"]
    assert [launch.once for launch in both] == [1, 0.75]


@pytest.mark.skipif(toolkit.tool("ptxas") is None, reason="needs ptxas")
def test_what_a_launch_takes():
    (launch,) = emulate.launches(case("copy", strided))
    assert launch.profile.arch == "sm_86"
    assert 0 < launch.needs.registers <= 32
    assert launch.needs.spill_bytes == 0
    assert launch.occupancy.share == 1


def test_the_table():
    def missing(inputs):
        raise DeviceError("no [kernels] yet")

    code, text = printed(
        {"test": [case("copy", strided), case("two passes", two_passes), case("none", missing)]}
    )
    assert code == 1
    assert "two_passes" in text
    assert "1.52" in text
    assert "no [kernels] yet" in text
    code, _ = printed({"test": [case("copy", strided)], "later": []})
    assert code == 0
    assert printed({"later": []}) == (1, f"{CAPTION}\nno GPU kernels: later\n")


def test_times_cannot_be_kept(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv=["--device", "emulator", "--save", "folder"])
    assert exit_.value.code == 2
    assert "measures no times" in capsys.readouterr().err
