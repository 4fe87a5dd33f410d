"""Collects the pages of the site in one folder of Markdown, with the layout of their addresses.

READMEs are in the folders that they describe, with links that work in the repository; here these become links
between pages, or to a highlighted copy of the file. ``<!-- generated: NAME ARGUMENTS -->`` is replaced by the result
of ``generated.py``.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from scripts.docs import generated, snippets

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGES = HERE / "pages"

READMES = {
    "index": "README.md",
    "kernels/index": "kernels/README.md",
    "emulator": "gpu_ops/emulator/README.md",
    "performance/measuring": "perf/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(?<![\[`])`(?P<path>[\w.-]+(?:/[\w.-]+)+)`(?![\]`])")
TIMEOUT = 300  # seconds per page
LATE = "late"
GENERATED = re.compile(r"^<!-- generated: (?P<words>[^>]+?) -->$", re.M)


class Stage:
    """Pages being collected: the page of each file of the repository, and the faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {name: ROOT / path for name, path in READMES.items()}
        for path in sorted(PAGES.rglob("*.md")):
            self.files[path.relative_to(PAGES).with_suffix("").as_posix()] = path
        self.pages = {path: name for name, path in self.files.items()}
        self.generated = generated.pages()
        self.sources: set[str] = set()
        self.problems: list[str] = []

    def write(self, name: str, text: str, file: Path) -> None:
        """Write one page; its links are relative to ``file``."""
        text = GENERATED.sub(lambda m: generated.part(m["words"].split()), text)
        parts = FENCED.split(text)  # code is at the odd places
        parts[::2] = [self._prose(part, name, file) for part in parts[::2]]
        target = self.folder / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(parts), encoding="utf-8")

    def _prose(self, text: str, name: str, file: Path) -> str:
        text = LINK.sub(lambda m: self._link(m, name, file), text)
        return CODE.sub(lambda m: self._code(m, name), text)

    def _link(self, match: re.Match[str], name: str, file: Path) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target:
            return match[0]
        made = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)).removesuffix(".md")
        if made in self.generated or made in self.files:
            return match[0]
        path = ROOT / target[1:] if target.startswith("/") else (file.parent / target).resolve()
        if not path.exists():
            self.problems.append(f"{file.relative_to(ROOT)}: link to {target}, which does not exist")
            return match[0]
        if match["image"]:
            return self._image(path, match["text"], name)
        page = self.pages.get(path) or self.pages.get(path / "README.md")
        if page is not None:
            relative = posixpath.relpath(f"{page}.md", posixpath.dirname(name) or ".")
            return f"[{match['text']}]({relative}{'#' if anchor else ''}{anchor})"
        return self._source(path.relative_to(ROOT).as_posix(), match["text"], name)

    def _image(self, path: Path, text: str, name: str) -> str:
        copy = self.folder / "pictures" / f"{path.parent.name}-{path.name}"  # each machine has a speed.svg
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        return f"![{text}](/pictures/{copy.name})"

    def _code(self, match: re.Match[str], name: str) -> str:
        path = ROOT / match["path"]
        return self._source(match["path"], match[0], name) if path.is_file() else match[0]

    def _source(self, path: str, text: str, name: str) -> str:
        """Link to the highlighted copy of a file, as HTML because Sphinx knows only pages."""
        if not (ROOT / path).is_file():
            return text  # a folder
        self.sources.add(path)
        relative = posixpath.relpath(f"source/{path}.html", posixpath.dirname(name) or ".")
        return f'<a class="source" href="{relative}">{text}</a>'


def stage(folder: Path, *, run: bool) -> list[str]:
    """Write all pages below ``folder``, with a line on stdout for each. Returns the faults, a line each.

    A page with a failing block is written without the outputs of that block and of those after it.
    """
    site = Stage(folder)
    folder.mkdir(parents=True)
    if run:
        print("docs: compiling the kernels that pages show", flush=True)
        generated.compile_kernels()  # forks, so it must run before threads start
        print("docs: planning the memory of fine-tuning", flush=True)
        generated.plan_tuning()
        print("docs: drawing the benchmark results", flush=True)
        generated.draw_pictures()
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(page_text, file, run): name for name, file in site.files.items()}
        for count, done in enumerate(as_completed(running), 1):
            if run:
                seconds, failed = time.perf_counter() - start, " FAILED" if done.result()[1] else ""
                print(f"docs: {count}/{len(running)} {running[done]}{failed}, {seconds:.0f} s", flush=True)
    for done, name in running.items():
        text, problem = done.result()
        site.problems += [problem] if problem else []
        site.write(name, text + generated.contents(name), site.files[name])
    for name, text in site.generated.items():
        site.write(name, text, ROOT / "README.md")
    (folder / "sources.json").write_text(json.dumps(sorted(site.sources)), encoding="utf-8")
    return site.problems


def page_text(file: Path, run: bool) -> tuple[str, str]:
    """Text of a page with the output of its code, and its fault; empty if there is none."""
    text = file.read_text(encoding="utf-8")
    if not file.is_relative_to(PAGES):
        return text, ""  # READMEs have separate tests
    try:
        blocks = snippets.blocks(text, file.name)
    except snippets.SnippetError as error:
        return text, str(error)
    outputs, problem = [""] * len(blocks), ""
    if run and any("run" in block.options for block in blocks):
        printed, problem = run_in_process(file)
        outputs[: len(printed)] = printed
        if problem == LATE:
            block = blocks[min(len(printed), len(blocks) - 1)]
            problem = f"{file.name}:{block.line}: not done {TIMEOUT} s after the page began"
    return snippets.shown(text, file.name, outputs), problem


def run_in_process(file: Path) -> tuple[list[str], str]:
    """Outputs of a page's blocks up to one that fails, and its error, :data:`LATE`, or an empty string."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [sys.executable, "-m", "scripts.docs.snippets", str(file), output.name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        # in a separate session, so that processes started by blocks end with it
        page = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            problem = page.communicate(timeout=TIMEOUT)[1].strip()
            problem = problem if page.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(page.pid, signal.SIGKILL)
            page.communicate()
            problem = LATE
        printed: list[str] = json.loads(Path(output.name).read_text(encoding="utf-8") or "[]")
        return printed, problem
