"""Source of the standard library as a text that every machine has."""

from __future__ import annotations

import hashlib

import pytest

from gpu_ops.errors import MissingFileError
from gpu_ops.training import stdlib_text, text
from tests.support.processes import python


def test_it_is_the_source_and_the_same_in_another_process():
    source = stdlib_text()
    assert len(source) > 4_000_000
    assert source.count(b"import unittest") < 30  # tests are omitted
    assert b"def dataclass(" in source.decode().encode()
    code = "import hashlib; from gpu_ops.training import *; print(hashlib.sha256(stdlib_text()).hexdigest())"
    other = python("-c", code, PYTHONHASHSEED="7").strip()
    assert other == hashlib.sha256(source).hexdigest()


def test_without_source_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MissingFileError, match="stdlib_text: no source of the standard library"):
        stdlib_text()


def test_files_are_sorted_and_tests_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    for name in (
        "json/b.py",
        "json/a/x.py",
        "json/tests/c.py",
        "ast.py",
        "encodings/d.py",
        "site-packages/e.py",
        "zz.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} ")
    assert stdlib_text() == b"ast.py json/a/x.py json/b.py "
