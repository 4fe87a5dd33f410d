"""Builds the sdist and, from it, the wheel, and checks the installation that a user gets.

- both hold exactly the package files of the working tree, as real files under ``gpu_ops/``, and no links:
  top-level ``kernels`` or ``reference`` in site-packages would overwrite other people's packages;
- the wheel installs in a clean virtual environment and computes from an empty folder.

    python scripts/check_wheel.py [--no-install]
"""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = {".py", ".pyi", ".typed", ".cu", ".cuh"}

FIRST_CALL = """
import numpy as np, gpu_ops
assert "site-packages" in gpu_ops.__file__, gpu_ops.__file__
x = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
y = gpu_ops.rmsnorm(x, np.ones(256, np.float32))
want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
assert np.abs(y - want).max() < 1e-5
print("gpu_ops", gpu_ops.__version__, "from", gpu_ops.__file__)
"""


def tree_files() -> dict[str, int]:
    """Package files of the working tree, as ``gpu_ops/...`` names, with their sizes."""
    sizes = {}
    for folder, _, names in os.walk(ROOT / "gpu_ops", followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix in PACKAGED:
                sizes[path.relative_to(ROOT).as_posix()] = path.stat().st_size
    return sizes


def compare(kind: str, held: dict[str, int], wanted: dict[str, int]) -> None:
    missing = sorted(wanted.keys() - held.keys())
    extra = sorted(held.keys() - wanted.keys())
    differ = sorted(n for n in wanted.keys() & held.keys() if wanted[n] != held[n])
    for what, names in (("missing", missing), ("not in the tree", extra), ("of another size", differ)):
        if names:
            sys.exit(f"check_wheel: {kind}: {what}: {', '.join(names)}")


def check_wheel(path: Path, wanted: dict[str, int]) -> None:
    with zipfile.ZipFile(path) as wheel:
        entries = [e for e in wheel.infolist() if not e.is_dir()]
    if links := [e.filename for e in entries if stat.S_ISLNK(e.external_attr >> 16)]:
        sys.exit(f"check_wheel: wheel: links: {links}")
    held = {e.filename: e.file_size for e in entries if ".dist-info/" not in e.filename}
    compare("wheel", held, wanted)
    if not any(e.filename.endswith("licenses/LICENSE") for e in entries):
        sys.exit("check_wheel: wheel: no licence")


def check_sdist(path: Path, wanted: dict[str, int]) -> None:
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
    if links := [m.name for m in members if m.issym() or m.islnk()]:
        sys.exit(f"check_wheel: sdist: links: {links}")
    inside = {PurePosixPath(*PurePosixPath(m.name).parts[1:]): m.size for m in members if m.isfile()}
    held = {str(p): size for p, size in inside.items() if p.parts[0] == "gpu_ops"}
    compare("sdist", held, wanted)
    metadata = {"PKG-INFO", "pyproject.toml", "setup.cfg", "README.md", "LICENSE", "MANIFEST.in"}
    other = {p.parts[0] for p in inside} - {"gpu_ops", "gpu_ops.egg-info"} - metadata
    if other:
        sys.exit(f"check_wheel: sdist: unexpected at the top: {sorted(other)}")


def first_call(wheel: Path, work: Path) -> None:
    """Installs the wheel with its dependencies in a clean environment and computes from an empty folder."""
    subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
    python = work / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(pip, check=True)
    empty = work / "empty"
    empty.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    subprocess.run([python, "-c", FIRST_CALL], cwd=empty, env=env, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-install", action="store_true", help="only build and list, install nothing")
    options = parser.parse_args()
    wanted = tree_files()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build = [sys.executable, "-m", "build", "--outdir", work, ROOT]
        built = subprocess.run(build, check=False, capture_output=True, text=True)
        if built.returncode:
            sys.exit(f"check_wheel: the build failed\n{built.stdout}{built.stderr}")
        (sdist,), (wheel,) = work.glob("*.tar.gz"), work.glob("*.whl")
        check_sdist(sdist, wanted)
        check_wheel(wheel, wanted)
        print(f"{wheel.name} and {sdist.name}: {len(wanted)} files, all under gpu_ops/, no links")
        if not options.no_install:
            first_call(wheel, work)


if __name__ == "__main__":
    main()
