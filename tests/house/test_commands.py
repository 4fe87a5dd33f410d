"""Console script, exit codes and JSON of the commands that need no model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpu_ops.__main__ import main
from gpu_ops.cli import preset_report
from gpu_ops.cli.parser import COMMANDS, make_parser
from gpu_ops.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]


def test_the_console_script_is_the_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["gpu-ops"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("script", "name"), [("/bin/gpu-ops", "gpu-ops"), ("x/__main__.py", "python -m gpu_ops")]
)
def test_help_names_the_command_as_it_was_called(script, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    assert make_parser().format_usage().startswith(f"usage: {name} ")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name])
def test_each_command_has_help_and_a_module(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f" {command} [-h]" in capsys.readouterr().out
    assert callable(importlib.import_module(f"gpu_ops.cli.{COMMANDS[command]}").run)


def test_json_before_a_command_is_that_of_the_command(capsys):
    assert main(["--json", "presets", "T4"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "T4"
    with pytest.raises(SystemExit, match="2"):
        main(["--json", "warmup"])
    assert "warmup prints no JSON" in capsys.readouterr().err


def test_errors_begin_with_the_command_and_name_no_function(capsys, tmp_path, monkeypatch):
    assert main(["presets", "H1000"]) == 2
    assert capsys.readouterr().err.startswith("presets: no preset for 'H1000'")
    (tmp_path / "config.json").mkdir()
    assert main(["memory", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"memory: {tmp_path / 'config.json'}: it is a folder")


@pytest.mark.parametrize(("text", "name"), [("bf16", "bfloat16"), ("fp32", "float32"), ("int8", "int8")])
def test_dtypes_have_short_names(text, name):
    parsed = make_parser().parse_args(["serve", "--model", "folder", "--kv-dtype", text])
    assert parsed.kv_dtype == name


def test_presets_as_json_and_as_a_table(capsys, monkeypatch):
    assert main(["presets", "--json"]) == 0
    assert [card["name"] for card in json.loads(capsys.readouterr().out)] == [
        p.name for p in PRESETS.values()
    ]
    assert main(["presets", "rtx4090", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)
    assert (card["name"], card["sms"]) == ("RTX 4090", 128)
    assert main(["presets", "RTX 1"]) == 2
    assert capsys.readouterr().err.startswith("presets: ")
    assert main(["presets"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_card_is_shown_without_compilers(capsys, monkeypatch):
    monkeypatch.setattr(preset_report, "unavailable", lambda device, backend: "no compiler")
    assert main(["presets", "rtx4090"]) == 0
    shown = capsys.readouterr().out
    assert "1008 GB/s" in shown
    assert "left out: no compiler" in shown


def test_the_cache_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 0
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]


def test_a_closed_pipe_ends_a_command_quietly():
    """A reader such as ``head`` that has seen enough is no error."""
    code = "from gpu_ops.cli.terminal import run_command; run_command(lambda: print('x' * (1 << 20)))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
