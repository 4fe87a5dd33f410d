"""Sphinx extension of the site: formulas as MathML, highlighted copies of files, a page for every public name."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata

from gpu_ops import errors
from scripts.docs import generated

ROOT = Path(__file__).resolve().parent.parent.parent
LANGUAGES = {
    ".py": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".sh": "bash",
    ".toml": "toml",
    ".md": "markdown",
    ".ipynb": "json",
}
logger = logging.getLogger(__name__)


def inline_math(translator: Any, node: nodes.math) -> None:
    """Emit MathML, which browsers draw without scripts or fonts to load."""
    translator.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    formula = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div class="formula">{formula}</div>\n')
    raise nodes.SkipNode


def escape_types(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape types, which are prose that napoleon sets in italics: the stars of ``head_dim**-0.5`` are no markup."""
    for i, line in enumerate(lines):
        if match := re.fullmatch(r"(\w+(?:, \w+)* : )(.*\*.*)", line):
            lines[i] = match[1] + match[2].replace("*", r"\*")


def link_errors(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Link each error of ``Raises``, which lists several in one line, in a section that napoleon leaves alone."""
    if "Raises" not in lines:
        return
    start = lines.index("Raises") + 2
    ends = (i for i in range(start, len(lines)) if re.fullmatch("-+", lines[i]))
    end = next(ends, len(lines) + 1) - 1
    section = []
    for line in lines[start:end]:
        if re.fullmatch(r"[A-Z]\w+(?:, [A-Z]\w+)*", line):
            names = [f"{'~gpu_ops.errors.' * hasattr(errors, name)}{name}" for name in line.split(", ")]
            section += ["", ", ".join(f":class:`{name}`" for name in names)]
        else:
            section.append(line)
    lines[start - 2 : end] = ["Errors", "------", *section[1:]]


def types_are_prose(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.TextElement | None:
    """Treat an attribute's type, such as ``uint8 array (rows, width)``, as prose; a role (:class:`Op`) is a name."""
    return None if isinstance(contnode, nodes.literal) else contnode


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Page for every file that a page links to."""
    for path in json.loads(Path(app.srcdir, "sources.json").read_text(encoding="utf-8")):
        text = (ROOT / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(Path(path).suffix, "text")
        code = app.builder.highlighter.highlight_block(text, language, linenos="inline")  # type: ignore[attr-defined]
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def check_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that no page describes, which fails the build."""
    described = {name for name, *_ in env.get_domain("py").get_objects()}
    for name in undescribed(described):
        logger.warning("%s is public, and has no docstring or no page", name)


def undescribed(described: Set[str]) -> Iterator[str]:
    """Exported names of public modules, and methods of their classes, that no page describes. autodoc leaves out
    methods without a docstring; an attribute may be described by its class."""
    for module in ("gpu_ops", *generated.MODULES):
        exported = importlib.import_module(module)
        for name in exported.__all__:
            thing = getattr(exported, name)
            if name == "__version__" or inspect.ismodule(thing):
                continue
            if f"{module}.{name}" not in described or not inspect.getdoc(thing):
                yield f"{module}.{name}"
            for method, value in vars(thing).items() if inspect.isclass(thing) else ():
                public = not method.startswith("_") and (
                    inspect.isfunction(value) or isinstance(value, property)
                )
                if public and f"{module}.{name}.{method}" not in described:
                    yield f"{module}.{name}.{method}"


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", escape_types, priority=100)
    app.connect("autodoc-process-docstring", link_errors, priority=100)  # before napoleon
    app.connect("missing-reference", types_are_prose)
    app.connect("html-collect-pages", source_pages)
    app.connect("env-check-consistency", check_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
