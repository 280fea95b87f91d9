"""The layout of the package: folders only, imports only of what a package offers.

`lint-imports` checks the direction of imports. These tests check what is imported.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import policyc

pytestmark = pytest.mark.any_jax

ROOT = Path(policyc.__file__).parent
DEVELOPMENT = ROOT.parent / "docs" / "reference" / "development.md"
DATA = {"grammars", "policies"}  # inside the package in a wheel, beside it in a checkout
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@dataclass(frozen=True, slots=True)
class PackageImport:
    """An import of another package: `policyc.language.loader` for a module, with the name that is taken from it."""

    file: str
    line: int
    module: str
    name: str | None = None

    @property
    def package(self) -> str:
        return self.module.split(".")[1]

    @property
    def parts(self) -> list[str]:
        """What is named below the package, outermost first."""
        return [*self.module.split(".")[2:], *([self.name] if self.name else [])]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {'.'.join(['policyc', self.package, *self.parts])}"


def module_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """The imports and attributes in a file: the nodes that these tests read."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute))


def imports_of_others(package: str) -> Iterator[PackageImport]:
    """Every import, also inside functions, of another package of policyc."""
    for path in module_files(package):
        for node in syntax_nodes(path):
            file = path.relative_to(ROOT).as_posix()
            if isinstance(node, ast.Import):
                imports = [PackageImport(file, node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imports = [
                    PackageImport(file, node.lineno, f"policyc.{alias.name}")
                    if node.module == "policyc"
                    else PackageImport(file, node.lineno, node.module, alias.name)
                    for alias in node.names
                ]
            else:
                continue
            yield from (i for i in imports if i.module.startswith("policyc.") and i.package in PACKAGES
                        and i.package != package)  # fmt: skip


def read_package_map() -> list[str]:
    """The packages in the table of the map, in its order."""
    text = DEVELOPMENT.read_text(encoding="utf-8")
    section = text.partition("## Map of the packages")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)


def modules_of(package: str) -> set[str]:
    """The modules and packages directly inside a package."""
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}


needs_checkout = pytest.mark.skipif(not DEVELOPMENT.exists(), reason="an installed package has no docs")


@needs_checkout
def test_the_map_of_the_packages_has_the_order_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c.get("containers") == ["policyc"])
    assert read_package_map() == layers[::-1]
    assert sorted(layers) == PACKAGES


@needs_checkout
def test_the_recipes_of_the_page_name_what_exists() -> None:
    text = DEVELOPMENT.read_text(encoding="utf-8").partition("## How to add")[2]
    paths = re.findall(r"`((?:policyc|tests|docs)/[\w/.]+)`", text)
    assert paths
    assert not [p for p in paths if not re.search("NAME|CODE", p) and not (ROOT.parent / p).exists()]
    names = re.findall(r"`(\w+)`\s+(?:of\s+)?\(?`(policyc/[\w/]+\.py)`", text)
    assert names
    for name, path in names:
        assert re.search(rf"\b{name}\b", (ROOT.parent / path).read_text(encoding="utf-8")), f"{path}: {name}"


def test_the_root_of_the_package_holds_packages_only() -> None:
    # A folder that an earlier version had may stay behind, with nothing in it but compiled modules.
    files = {path.relative_to(ROOT).parts for path in ROOT.rglob("*") if path.is_file()}
    names = {parts[0] for parts in files if "__pycache__" not in parts} | {"models"}  # a link in a checkout
    assert names - DATA == {*PACKAGES, "__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_for_and_lists_its_modules(package: str) -> None:
    module = import_module(f"policyc.{package}")
    assert module.__doc__
    assert set(module.__all__) <= modules_of(package)
    assert list(module.__all__) == sorted(module.__all__)


def test_packages_import_only_what_others_offer() -> None:
    """Modules that the other package lists, and no private name of it or of its modules."""
    for package in PACKAGES:
        imports = list(imports_of_others(package))
        assert not [
            str(found)
            for found in imports
            if not found.parts or found.parts[0] not in import_module(f"policyc.{found.package}").__all__
        ]
        assert not [str(found) for found in imports if any(part.startswith("_") for part in found.parts)]
        # `from policyc.compiler import pipeline` and then `pipeline._name` is as private as importing `_name`.
        modules = {(found.file, found.parts[-1]) for found in imports if found.parts}
        assert not [
            f"{file}:{node.lineno}: {node.value.id}.{node.attr}"
            for path in module_files(package)
            for file in [path.relative_to(ROOT).as_posix()]
            for node in syntax_nodes(path)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and (file, node.value.id) in modules
        ]
