"""Builds the documentation site: stages the pages, runs their snippets, calls Sphinx, checks every link.

    scripts/docs.sh [OUTDIR] [--no-run]

``stage.py`` collects pages, READMEs and generated parts into one folder of Markdown; ``snippets.py`` runs code;
``build.py`` reads the finished HTML. ``conf.py`` and ``extension.py`` are Sphinx's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scripts.docs import stage

ELSEWHERE = ("http://", "https://", "mailto:", "data:")


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name in ("href", "src"):
                self.targets.append(value)
            elif name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)


def broken(folder: Path) -> list[str]:
    """Broken links of the pages in a folder, one line each: their file or anchor does not exist."""
    folder = folder.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            if target.startswith(ELSEWHERE):
                continue
            parts = urlsplit(target)
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not file.exists() or folder not in file.parents:
                problems.append(f"{path.relative_to(folder)}: link to {target}, which does not exist")
            elif anchor and file in pages and anchor not in pages[file].anchors:
                problems.append(f"{path.relative_to(folder)}: link to {target}, which has no such anchor")
    return problems


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def sphinx(arguments: list[str]) -> int:
    """Run Sphinx and return its exit status. The rest of this file can be tested without Sphinx."""
    from sphinx.cmd.build import main

    return int(main(arguments))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("outdir", nargs="?", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--no-run", action="store_true", help="snippets without output, kernels not compiled")
    options = parser.parse_args(argv)
    if options.outdir.exists() and not (options.outdir / ".buildinfo").exists():
        parser.error(f"{options.outdir} is there and holds no site: it would be replaced")
    staged = ROOT / "build" / "docs-pages"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(options.outdir, ignore_errors=True)
    start = time.perf_counter()
    problems = stage.stage(staged, run=not options.no_run)
    print(
        f"docs: pages and snippets in {time.perf_counter() - start:.0f} s; Sphinx builds the site", flush=True
    )
    folders = ["-c", str(HERE), "-d", f"{staged}.cache", str(staged), str(options.outdir)]
    if code := sphinx([*["-q", "-W", "--keep-going", "-n", "-E", "-j", "auto", "-b", "html"], *folders]):
        problems.append(f"Sphinx ends with status {code}")
    problems += broken(options.outdir)
    print(f"docs: {options.outdir / 'index.html'}, in {time.perf_counter() - start:.0f} s")
    for problem in problems:
        print(f"docs: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
