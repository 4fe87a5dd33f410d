"""``python -m perf --op comm``: the fit, a short run on two ranks, and omitted parts."""

from __future__ import annotations

import json

import pytest

from perf import cli, comm
from tests.distributed.test_distributed import needs_mpi

SIZES = [1 << n for n in range(10, 27, 2)]


def test_the_fit_finds_latency_and_bandwidth():
    fit = comm.Fit.of(SIZES, [3e-6 + n / 2e9 for n in SIZES])
    assert (fit.alpha, fit.beta) == pytest.approx((3e-6, 2e9))
    assert fit.worst == pytest.approx(1)


def test_the_fit_weighs_all_sizes_alike():
    """Doubling the time at one of nine sizes changes latency and bandwidth by less, at either end."""
    for slow in (0, -1):
        seconds = [3e-6 + n / 2e9 for n in SIZES]
        seconds[slow] *= 2
        fit = comm.Fit.of(SIZES, seconds)
        assert 2.5e-6 < fit.alpha < 5e-6
        assert 1.7e9 < fit.beta < 2.1e9
        assert 1.3 < fit.worst < 2


def test_no_latency_is_below_zero():
    fit = comm.Fit.of(SIZES, [n / 1e9 * (n / 1e3) ** 0.1 for n in SIZES])
    assert 0 <= fit.alpha < 1e-6
    assert 1 < fit.worst < 2
    assert fit.beta > 0


@needs_mpi
def test_a_short_run(tmp_path, capsys):
    assert cli.main(None, ["--op", "comm", "--quick", "--save", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "comm-2.json").read_text())
    assert (report["world"], report["ranks"]) == ("Mpi", 2)
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "shift", "memcpy"]
    assert list(report["times"]) == list(report["fits"]) == names
    assert all(list(map(int, line)) == SIZES[:6] for line in report["times"].values())
    assert all(t > 0 for line in report["times"].values() for t in line.values())
    assert report["sent"] == {
        **{"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 1.0, "all_to_all": 0.5},
        **{"broadcast": 1.0, "shift": 1.0, "memcpy": 1.0},
    }
    assert "Mpi, 2 ranks" in capsys.readouterr().out


def test_without_mpi_it_says_why(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(None, ["--op", "comm"]) == 0
    assert 'comm: skipped, mpi4py is not installed: pip install ".[mpi]"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--op", "comm", "rope"], "run it alone"), (["--op", "comm", "--seqlen", "8"], "--ranks, --quick")],
)
def test_options_that_do_not_go_with_it(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(None, words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_picture_names_every_collective(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install matplotlib")
    from perf.pictures import comm as picture
    from perf.pictures.style import settings

    times = {name: {str(n): 1e-6 + n / 1e9 for n in SIZES} for name in picture.COLOURS}
    fits = {name: {"alpha": 1e-6, "beta": 1e9, "worst": 0.0} for name in times}
    with settings():
        text = picture.draw({"times": times, "fits": fits}, "2 ranks").save(tmp_path / "x.svg").read_text()
    assert all(f">{name}: 1 us + bytes / 1 GB/s<" in text for name in times)
    assert all(f">{size}<" in text for size in ("1 KiB", "1 MiB", "64 MiB"))
