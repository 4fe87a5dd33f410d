"""``python -m perf.gpu_report DIR``: report.md from the results of scripts/gpu_check.sh in a folder so far.

It has the tests, the emulator against the GPU, every case's share of the measured limits with the data sheet's
prediction, the largest disagreements between the two, the tiles that autotune prefers, and pictures if matplotlib is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_ops.cli.terminal import run_command
from gpu_ops.errors import OptionError
from gpu_ops.presets import DevicePreset, select_preset
from perf import pictures, roofline, runs
from perf.attention_grids import Shape
from perf.runs import Row

MOST = 10  # disagreements, and failures in full


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m perf.gpu_report DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    saved = load(folder)
    text = "\n".join(report(folder, saved))
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def load(folder: Path) -> list[runs.Run]:
    """Saved benchmarks, oldest first."""
    saved = [runs.load(path) for path in sorted((folder / "perf").glob("*.csv"))]
    return sorted(saved, key=lambda run: str(run.facts["created"]))


def report(folder: Path, saved: Sequence[runs.Run]) -> Iterator[str]:
    card, preset = None, None
    if saved:
        card = saved[-1].get("machine", "gpu") or {}
        preset = preset_of(card.get("name", ""))
    yield f"# GPU check: {card.get('name', 'an unknown card') if card else 'nothing measured yet'}"
    if saved:
        machine = saved[-1].facts["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        yield f"\nCommit {machine['commit']}; driver {card.get('driver', 'unknown') if card else ''}; {versions}."
        yield (
            f"Prediction: the preset {preset.name}."
            if preset
            else "No preset is of this card: no prediction."
        )
    yield from steps(folder)
    yield from tests(folder)
    rows = list({row["key"]: row for run in saved for row in run.rows}.values())  # the latest of each
    yield from benchmarks(rows, preset)
    if preset:
        yield from disagreements(rows, preset)
    yield from tiles(folder)
    for name in draw(saved, folder):
        yield f"\n![{Path(name).stem}]({name})"


def preset_of(name: str) -> DevicePreset | None:
    try:
        return select_preset(name)
    except OptionError:
        return None


def steps(folder: Path) -> Iterator[str]:
    path = folder / "summary.txt"
    if path.is_file():
        yield f"\n## Steps\n\n```\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def tests(folder: Path) -> Iterator[str]:
    lines = [line for path in sorted(folder.glob("tests*.jsonl")) for line in json_lines(path)]
    latest = {line["test"]: line for line in lines}  # part 4 repeats the tests of part 1
    yield "\n## Tests\n"
    if not latest:
        yield "None ran yet."
        return
    count = Counter(line["outcome"] for line in latest.values())
    yield ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items())) + "."
    failed = [line for line in latest.values() if line["outcome"] == "failed"]
    for line in failed[:MOST]:
        yield f"\n- `{line['test']}`\n\n  ```\n{indent(line['message'], 12)}\n  ```"
    if len(failed) > MOST:
        yield "\n" + "\n".join(f"- `{line['test']}`" for line in failed[MOST:])
    noted = [
        (line["test"].rpartition("::")[2], *each)
        for line in latest.values()
        for each in line["properties"].items()
    ]
    if noted:
        yield "\n### The emulator against the GPU\n"
        yield from table(("test", "result", "agreement"), noted)


def indent(text: str, lines: int) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-lines:])


def benchmarks(rows: Sequence[Row], preset: DevicePreset | None) -> Iterator[str]:
    yield "\n## Share of the limits\n"
    if not rows:
        yield "Nothing was measured yet."
        return
    yield (
        "Limit: the least time at the limits measured in the same run, over the time. Data sheet: the same for the "
        "card's figures."
    )
    yield ""
    cells = []
    for row in rows:
        if "ours_median" not in row:
            cells.append(
                (row["key"], "failed", "", "", "", "", str(row.get("failure", "")).partition("\n")[0])
            )
            continue
        predicted = prediction(row, preset)
        share = "" if predicted is None else f"{predicted / row['ours_median']:.0%}"
        limit = f"{row['share_of_limit']:.0%} {str(row['limited_by'])[:1].upper()}"
        energy = f"{1e3 * row['ours_joules']:.3g} mJ" if "ours_joules" in row else ""
        clock = f"{row['ours_sm_mhz']:.0f}" if "ours_sm_mhz" in row else ""
        verdict = "" if row.get("passed") else "out of tolerance"
        cells.append((row["key"], f"{1e6 * row['ours_median']:.1f}", limit, share, energy, clock, verdict))
    yield from table(("case", "us", "limit", "data sheet", "energy", "MHz", ""), cells)


def disagreements(rows: Sequence[Row], preset: DevicePreset) -> Iterator[str]:
    """Largest disagreements between time and prediction, in either direction."""
    yield f"\n## The {MOST} largest disagreements between model and measurement\n"
    ratios = []
    for row in rows:
        predicted = prediction(row, preset)
        if predicted and row.get("ours_median"):
            ratios.append((row["ours_median"] / predicted, row["key"], predicted, row["ours_median"]))
    ratios.sort(key=lambda entry: -abs(math.log(entry[0])))
    cells = [(key, f"{1e6 * p:.1f}", f"{1e6 * m:.1f}", f"{ratio:.2f}") for ratio, key, p, m in ratios[:MOST]]
    yield from table(("case", "predicted us", "measured us", "measured / predicted"), cells)


def prediction(row: Row, preset: DevicePreset | None) -> float | None:
    """Minimum seconds by the data sheet; for attention's forward pass, by the units that perf/roofline.py counts."""
    if preset is None:
        return None
    shape = Shape.parse(row["shape"]) if row["op"] == "attention" else None
    if shape and row["name"] in ("forward", "forward causal") and row["dtype"] != "float64":
        bound = roofline.bound(preset, shape, row["dtype"], causal="causal" in row["name"])
        return bound.seconds[bound.limit]
    peaks = preset.peaks
    if "int8" in row["name"] or "both ternary" in row["name"]:
        peak = peaks.int8
    elif row["dtype"] in ("float16", "bfloat16"):
        peak = peaks.float16
    else:
        peak = max(peaks.float32, (peaks.tf32 or 0) / 3)
    return max(row["flops"] / (1e12 * peak), row["bytes"] / (1e9 * preset.memory_gbps)) or None


def tiles(folder: Path) -> Iterator[str]:
    """Problems for which autotune and the table of tiles differ."""
    yield "\n## Tiles\n"
    reports = list(json_lines(folder / "tune.jsonl"))
    if not reports:
        yield "autotune has measured nothing yet."
        return
    for choice in reports:
        if "error" in choice:
            yield f"- {choice['name']}: failed, {choice['error']}"
    measured = [choice for choice in reports if "error" not in choice]
    other = [choice for choice in measured if choice["winner"] != choice["model"]]
    yield f"autotune agrees with the table for {len(measured) - len(other)} of {len(measured)} problems.\n"
    if other:
        cells = [(choice["name"], choice["winner"], choice["model"], gain(choice)) for choice in other]
        yield from table(("problem", "autotune", "table", "table's time / autotune's"), cells)


def gain(one: dict[str, Any]) -> str:
    seconds = one["seconds"]
    return (
        f"{seconds[one['model']] / seconds[one['winner']]:.2f}" if one["model"] in seconds else "cannot run"
    )


def draw(saved: Sequence[runs.Run], folder: Path) -> Iterator[str]:
    """Draw the pictures and return their names."""
    if not saved or importlib.util.find_spec("matplotlib") is None:
        return
    for path in pictures.draw(pictures.Machine(saved), folder / "pictures"):
        yield str(path.relative_to(folder))


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Table in Markdown."""
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", ",") for cell in row) + " |"


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines; the last line of an interrupted run may be incomplete."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


if __name__ == "__main__":
    run_command(main)
