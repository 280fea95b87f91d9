"""Adds Python to the playground of a built site: `python docs/playground/build.py PYODIDE SITE`.

PYODIDE is the npm package, and SITE the folder of the site. policyc goes into a zip, with lark and without what needs
JAX. `make playground` runs it.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import lark

import policyc
from policyc.language.bundled import data_folder

PACKAGES = ("base", "language", "linter", "editor")
MODULES = (
    "__init__.py", "numerics/__init__.py", "numerics/targets.py", "compiler/__init__.py",
    "numerics/backends/__init__.py", "numerics/backends/backend.py", "numerics/backends/choice.py",
    "numerics/backends/selftest_record.py",
    "compiler/sites/__init__.py", "compiler/sites/site.py", "compiler/sites/site_kinds.py",
    "compiler/sites/site_list.py", "compiler/sites/site_masks.py", "compiler/sites/stacks.py",
    "compiler/matching/__init__.py", "compiler/matching/decisions.py", "compiler/matching/execution.py",
    "compiler/planning/__init__.py", "compiler/planning/plan.py",
    "compiler/tables/__init__.py", "compiler/tables/plan_json.py",
)  # fmt: skip
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
A_DATE = (2020, 1, 1, 0, 0, 0)  # of every file in the zip: the same sources make the same bytes


def archived() -> Iterator[tuple[str, Path]]:
    """The files of the zip, with their names in it."""
    package, library = Path(policyc.__file__).parent, Path(lark.__file__).parent
    own = [package / name for name in MODULES]
    own += [p for name in PACKAGES for p in (package / name).rglob("*") if p.suffix in (".py", ".md")]
    yield from ((f"policyc/{path.relative_to(package).as_posix()}", path) for path in own)
    for folder, suffix in (("grammars", "*.lark"), ("policies", "*.policy")):
        yield from ((f"policyc/{folder}/{path.name}", path) for path in data_folder(folder).glob(suffix))
    for path in (*library.rglob("*.py"), *library.rglob("*.lark")):
        yield f"lark/{path.relative_to(library).as_posix()}", path


def write_archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, path in sorted(archived()):
            archive.writestr(zipfile.ZipInfo(name, A_DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)


def main(pyodide: Path, site: Path) -> None:
    playground = site / "playground"
    (playground / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PYODIDE_FILES:
        shutil.copyfile(pyodide / name, playground / "pyodide" / name)
    write_archive(playground / "policyc.zip")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
