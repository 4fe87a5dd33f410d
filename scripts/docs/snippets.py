"""Runs the code blocks of a page, in order and in one namespace, and puts the output of each below it.

The first line of a fence says how to treat it:

    ```python run           executed; its output follows
    ```python run lines=12  the same; of the output the first 12 lines
    ```python file=ring.py  saved under this name, for a later block
    ```sh run               a command line, in a folder with the page's files and links to the repository's folders
    ```python needs=torch   not executed here; the ``text`` block below shows what it prints, and a test compares it

    python -m scripts.docs.snippets PAGE.md OUTPUT.json    runs a page; exits with 1 at the first block that fails

OUTPUT.json holds the outputs of the blocks that have run so far.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^```(?P<language>python|sh)(?P<words>[^\n`]*)\n(?P<code>.*?)^```$", re.M | re.S)


class SnippetError(Exception):
    """A block failed, or its first line is not understood."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    options: dict[str, str]
    code: str
    line: int
    end: int  # offset in the page's text, after the fence


def blocks(text: str, name: str) -> list[Block]:
    """Python and shell blocks of a page. Raises for a block that neither runs nor says why."""
    result = []
    for match in FENCE.finditer(text):
        options = dict(word.partition("=")[::2] for word in match["words"].split())
        line = text.count("\n", 0, match.start()) + 2
        if not options.keys() & {"run", "file", "needs"} or options.keys() - {
            "run",
            "file",
            "needs",
            "lines",
        }:
            raise SnippetError(f"{name}:{line - 1}: a block must say run, file=NAME or needs=PACKAGE")
        result.append(Block(match["language"], options, match["code"], line, match.end()))
    return result


def run_page(text: str, name: str, needs: str = "") -> list[str]:
    """Output of each block of a page, empty for blocks that do not run. ``needs``: package whose blocks run too."""
    return list(run_blocks(text, name, needs))


def run_blocks(text: str, name: str, needs: str = "") -> Iterator[str]:
    """Run a page, and yield the output of each block as soon as it has run."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.iterdir():
            if path.is_dir() and not path.name.startswith("."):
                Path(folder, path.name).symlink_to(path)
        with contextlib.chdir(folder):
            for block in blocks(text, name):
                if "file" in block.options:
                    Path(block.options["file"]).write_text(block.code, encoding="utf-8")
                runs = "run" in block.options or (needs and block.options.get("needs") == needs)
                yield run_block(block, name, namespace) if runs else ""


def promised(text: str, name: str) -> list[str]:
    """Output that the page shows for each block: the ``text`` block that follows it, else empty."""
    matches = (
        re.compile(r"\s*^```text\n(.*?)^```$", re.M | re.S).match(text, b.end) for b in blocks(text, name)
    )
    return [match[1].strip("\n") if match else "" for match in matches]


def run_block(block: Block, name: str, namespace: dict[str, Any]) -> str:
    """Run a block and return its output."""
    where = f"{name}:{block.line}"
    if block.language == "sh":
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "110",
        }
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SnippetError(f"{where}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        printed = done.stdout
    else:
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                # so that a traceback shows line numbers of the page
                exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
        except Exception:
            raise SnippetError(f"{where}: {traceback.format_exc()}") from None
        printed = output.getvalue()
    lines = [line.rstrip() for line in printed.splitlines()]
    limit = int(block.options.get("lines", len(lines)))
    return "\n".join([*lines[:limit], *(["..."] if len(lines) > limit else [])]).strip("\n")


def shown(text: str, name: str, outputs: list[str]) -> str:
    """Text of the page with plain fences and outputs."""
    parts, at = [], 0
    for block, output in zip(blocks(text, name), outputs, strict=True):
        title = f"*{block.options['file']}*\n\n" if "file" in block.options else ""
        start = text.rindex(f"```{block.language}", 0, block.end - 3)
        parts += [text[at:start], f"{title}```{block.language}\n{block.code}```"]
        if output:
            parts.append(f"\n\n```{{code-block}} text\n:class: output\n\n{output}\n```")
        at = block.end
    return "".join([*parts, text[at:]])


def main(page: str, output: str) -> int:
    path, outputs = Path(page), []
    target = Path(output).resolve()  # blocks run in another folder
    target.write_text("[]", encoding="utf-8")
    try:
        for printed in run_blocks(path.read_text(encoding="utf-8"), path.name):
            outputs.append(printed)
            target.write_text(json.dumps(outputs), encoding="utf-8")
    except SnippetError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")
    sys.exit(main(*sys.argv[1:]))
