"""Broken links of finished HTML pages: missing files, missing anchors."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
