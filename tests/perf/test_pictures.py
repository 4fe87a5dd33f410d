"""Pictures of saved runs: their content, and its legibility in light and dark."""

from __future__ import annotations

import itertools
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.support.compilers import needs_nvrtc

pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install matplotlib")

from perf import attention_grids, pictures, runs
from perf.attention_grids import Shape
from perf.pictures import bars, bounds, data, error, kernel, lengths, roofline, speed
from perf.pictures.__main__ import main
from perf.pictures.style import THEME, WIDTH, Canvas, beside, hits, legend_rows, settings, spread, text_width

RESULTS = Path(__file__).parents[2] / "perf" / "results"
MACHINES = pictures.machines([path for path in RESULTS.iterdir() if path.name != "local"])
H100 = "nvidia-h100-80gb-hbm3"
CPU = "intel-xeon-avx512-2-threads"


@cache
def drawn(folder: str) -> dict[str, Canvas]:
    machine = MACHINES[folder]
    with settings():
        return {
            name: canvas
            for module in (speed, lengths, roofline, error)
            for name, canvas in module.pictures(machine)
        }


@cache
def saved(folder: str, name: str) -> str:
    with settings(), tempfile.TemporaryDirectory() as place:
        return drawn(folder)[name].save(Path(place) / "x.svg").read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("folder", sorted(MACHINES))
def test_a_picture_names_machine_date_and_commit(folder):
    machine = MACHINES[folder]
    for name, canvas in drawn(folder).items():
        labels_shown = texts(saved(folder, name))
        assert canvas.title in labels_shown
        (origin,) = [text for text in labels_shown if "commit" in text]
        assert machine.name in origin
        for run in machine.runs:
            assert run.facts["created"][:10] in origin
            assert run.facts["machine"]["commit"] in origin


@pytest.mark.parametrize("folder", sorted(MACHINES))
def test_all_text_is_inside_and_none_lies_on_another(folder):
    for name, canvas in drawn(folder).items():
        check_layout(canvas, upright(saved(folder, name)))


Placed = list[tuple[str, tuple[float, float, float, float]]]
"""(text, box in points)"""


def check_layout(canvas: Canvas, boxes: Placed) -> None:
    assert len(boxes) > 10
    for text, (left, top, right, bottom) in boxes:
        assert left >= 0, text
        assert top >= 0, text
        assert right <= 72 * canvas.width, text
        assert bottom <= 72 * canvas.height, text
    for (label, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        assert across < 1 or down < 1, f"{label!r} and {other!r}"


def upright(svg: str) -> Placed:
    """Boxes of text that is not rotated, in the widest font it may have."""
    boxes = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        style, text = element.get("style", ""), element.text or ""
        if not element.get("transform", "rotate(-0").startswith("rotate(-0") or not text:
            continue
        size = float(re.search(r"font-size: ([0-9.]+)px", style)[1])
        mono, bold = "monospace;" in style.replace("sans-serif", ""), "font-weight: 700" in style
        width = 72 * text_width(text, size, mono=mono, bold=bold)
        x, y = float(element.get("x", "nan")), float(element.get("y", "nan"))
        x -= {"start": 0.0, "middle": width / 2, "end": width}[re.search("text-anchor: ([a-z]+)", style)[1]]
        boxes.append((text, (x, y - 0.75 * size, x + width, y + 0.2 * size)))
    return boxes


@pytest.mark.parametrize("folder", sorted(MACHINES))
def test_every_case_has_its_values(folder):
    machine = MACHINES[folder]
    for dtype in data.dtypes(machine.rows()):
        shown = texts(saved(folder, f"speed_{dtype}"))
        rows = [row for row in machine.rows() if row["dtype"] == dtype]
        assert rows
        for row in rows:
            times = {key: row[key] for key in row if key.endswith("_median") and key != "limit_median"}
            for who, seconds in times.items():
                value = data.rate(row, seconds) if machine.on_gpu else data.time_text(seconds)
                ratio = "" if who == "ours_median" else " · " + data.ratio_text(seconds / row["ours_median"])
                assert value + ratio in shown, (row["key"], who)


@pytest.mark.parametrize("folder", sorted(MACHINES))
def test_bars_start_at_zero_on_a_linear_axis(folder):
    for name, canvas in drawn(folder).items():
        (axes, *_) = canvas.figure.axes
        assert bool(axes.patches) == name.startswith(("speed", "faster", "memory"))
        if axes.patches:
            assert axes.get_xscale() == "linear"
            assert axes.get_xlim()[0] == 0
            assert all(patch.get_x() == 0 for patch in axes.patches)


def test_a_cpu_has_no_legend_of_a_gpu():
    svg = saved(CPU, "speed")
    assert "torch" in texts(svg)
    assert not re.search("cuDNN|flash|CuPy|cuBLAS|H100", svg)
    assert "plain CuPy" in texts(saved(H100, "speed"))


def test_the_limits_are_those_of_the_cases_runs():
    first, second = MACHINES[H100].runs[:2]
    assert (first.get("config", "grid"), second.get("config", "grid")) == ("", "field")
    two = data.Machine([replace(run, facts=run.facts | {"limits": {**run.facts["limits"], "copy": copy}})
                        for run, copy in ((first, 1e12), (second, 2e12))])  # fmt: skip
    assert "in the same run: copy 1.00 TB/s" in speed.limits_text(two, grid=False)
    assert "in the same run: copy 2.00 TB/s" in speed.limits_text(two, grid=True)
    assert "in each run, here of the latest" in speed.limits_text(data.Machine([first, first]), grid=False)


def test_a_contender_that_was_not_timed_is_not_in_the_legend():
    machine = MACHINES[CPU]
    rows = [{key: row[key] for key in row if not key.startswith("torch")} for row in machine.rows()]
    picture = speed.speed(machine, rows)
    assert [name for name, _ in picture.contenders] == ["ours", "naive"]


def test_a_failed_case_says_so(tmp_path):
    machine = MACHINES[CPU]
    (row, *_) = machine.rows()
    failed = {key: value for key, value in row.items() if not key.startswith(("ours", "naive", "torch"))}
    with settings():
        canvas = bars.draw(speed.speed(machine, [failed | {"failure": "RuntimeError: no\nsecond line"}]))
        svg = canvas.save(tmp_path / "x.svg").read_text()
    assert "failed: RuntimeError: no" in [text.strip() for text in texts(svg)]


@pytest.mark.parametrize("folder", sorted(MACHINES))
def test_every_colour_has_a_dark_one(folder):
    for name in drawn(folder):
        svg = saved(folder, name)
        used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})(?=[;\"])", svg))
        assert used
        assert used <= {light for light, _ in THEME.values()}
        for light in used:
            assert f'[style*="fill: {light}"]' in svg


def test_colours_stand_out_from_the_background():
    """Contrast is as in WCAG 2: 4.5 for text, 3 for graphics."""

    def luminance(colour: str) -> float:
        channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    for theme in (0, 1):
        background = luminance(THEME["background"][theme])
        for name, colours in THEME.items():
            if name in ("background", "grid"):
                continue
            low, high = sorted((background, luminance(colours[theme])))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if name in ("text", "muted") else 3), (name, theme)
    assert len({light for light, _ in THEME.values()}) == len(THEME), "the style sheet tells colours apart"


def test_lines_against_length(tmp_path):
    machine = several_lengths()
    with settings():
        ((name, canvas),) = lengths.pictures(machine)
        svg = canvas.save(tmp_path / "x.svg").read_text()
    check_layout(canvas, upright(svg))
    shown = texts(svg)
    assert name == "attention_bf16_h16_d128"
    assert {
        "forward causal",
        "forward causal: memory",
        "512",
        "1k",
        "16k",
        "sequence length",
        "TFLOPS",
        "GiB",
    } <= set(shown)
    assert "torch, math" in shown
    assert "8.00 GiB" in shown, "the value at the end of a line"
    assert speed_names(machine).isdisjoint({"speed_grid"}), "the same cases are not drawn twice"


def several_lengths() -> data.Machine:
    run = MACHINES[H100].runs[-1]
    rows = MACHINES[H100].rows()
    row = next(row for row in rows if (row["name"], row["dtype"]) == ("forward causal", "bfloat16"))
    made = []
    for seqlen in (512, 1024, 16384):
        shape = Shape(1, seqlen, seqlen, 16, 16, 128)
        memory = {"ours_peak": 2.0**20, "ours_results": 0.0, "torch_math_results": 0.0}
        memory["torch_math_peak"] = 2.0**33 * (seqlen / 16384) ** 2
        made.append(row | {"shape": str(shape), "key": str(shape)} | memory)
    return data.Machine([replace(run, rows=made)])


def speed_names(machine: data.Machine) -> set[str]:
    with settings():
        return {name for name, _ in speed.pictures(machine)}


def test_bounds_are_those_of_the_data_sheets(tmp_path):
    with settings():
        canvas = bounds.draw(MACHINES[H100])
        svg = canvas.save(tmp_path / "x.svg").read_text()
    check_layout(canvas, upright(svg))
    shown = texts(svg)
    assert "989 TFLOPS, 3.35 TB/s, knee at 295" in shown
    assert "T4" not in shown, "it has no bfloat16"


@needs_nvrtc
def test_the_cost_of_a_kernel_by_source_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")
    profile = kernel.profile()
    costs = kernel.lines(profile)
    whole = sum(line.cost for line in profile.lines())
    assert 0.95 * whole < sum(line.cost for line in costs) <= whole
    assert "cp_async<" in costs[0].text
    with settings():
        canvas = kernel.draw(profile)
        svg = canvas.save(tmp_path / "x.svg").read_text()
    check_layout(canvas, upright(svg))
    assert costs[1].text in texts(svg)
    assert costs[1].where in texts(svg)


def test_the_command_draws_files_and_names_what_is_wrong(tmp_path, capsys):
    run = MACHINES[CPU].runs[0]
    file = runs.save(replace(run, rows=run.rows[:3]), tmp_path / CPU)
    assert main([str(file), "--to", str(tmp_path)]) == 0
    paths = capsys.readouterr().out.splitlines()
    assert str(tmp_path / CPU / "speed.svg") in paths
    assert all(Path(path).read_text().startswith("<svg") for path in paths)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.csv")])
    other = runs.load(file)
    other.facts["machine"]["cpu"] = "another"
    other.facts["created"] = "2026-12-01T00:00:00Z"
    for run in (runs.load(file), other):
        runs.save(run, tmp_path / "both")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "both"), "--to", str(tmp_path)])
    assert "runs of several machines" in capsys.readouterr().err


def test_the_repository_has_the_pictures_of_the_readme_alone():
    folder = Path(pictures.__file__).parent
    readme = (folder.parents[1] / "README.md").read_text(encoding="utf-8")
    tracked = sorted(re.findall(r"\]\(perf/pictures/(\S+\.svg)\)", readme))
    assert len(tracked) == 2
    for path in map(Path, tracked):
        assert (folder / path).is_file()
        assert path.stem in drawn(path.parent.name), "`python -m perf.pictures` draws it"


def test_a_legend_takes_as_many_lines_as_it_needs():
    entries = [("ours", f"a contender of a long name, {i}") for i in range(9)]
    rows = legend_rows(entries)
    assert [entry for row in rows for entry in row] == entries
    assert len(rows) > 1
    assert all(sum(text_width(text, 8) for _, text in row) < WIDTH for row in rows)


def test_shapes_are_read_back():
    problems = [p for grid in attention_grids.GRIDS.values() for p in grid(("bfloat16",), ())]
    assert all(Shape.parse(str(problem.shape)) == problem.shape for problem in problems)
    assert Shape.parse("2048 x 4096") is None


def test_labels_are_spread():
    assert spread([0.5, 0.5, 0.5], 0.2, 1.0) == pytest.approx([0.5, 0.7, 0.9])
    assert spread([0.95, 1.0, 0.9], 0.2, 1.0) == pytest.approx([0.8, 1.0, 0.6])


def test_labels_lie_beside_their_points():
    rng = np.random.default_rng(0)
    points = [tuple(point) for point in rng.uniform(1, 4, (12, 2))]
    boxes = beside(points, [(0.8, 0.12)] * 12, (0, 0, 6, 5), np.zeros((0, 4)))
    dots = np.array([(x, y, x, y) for x, y in points])
    assert np.all(hits(boxes, boxes) == 1), "each overlaps only itself"
    assert np.all(hits(boxes, dots) == 0)
