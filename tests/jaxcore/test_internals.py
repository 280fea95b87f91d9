"""JAX internals: imported in one module, and listed in docs/reference/internals.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import policyc
from policyc.jaxcore import internals

PACKAGE = Path(policyc.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "internals.md"


def test_only_one_module_imports_private_modules_of_jax():
    # Parsing every module takes a second. Those without this name import no private module.
    texts = {
        path: text for path in PACKAGE.rglob("*.py") if "_src" in (text := path.read_text(encoding="utf-8"))
    }
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom) and "jax._src" in ast.unparse(node)
    }
    assert importers == {"jaxcore/internals.py"}


def test_the_page_lists_every_private_name_that_is_used():
    page = PAGE.read_text(encoding="utf-8")
    used = {name for path in (PACKAGE / "jaxcore").rglob("*.py") for name in private_names(path)}
    assert used
    assert sorted(name for name in used if name not in page) == []


def first_cells(section: str) -> set[str]:
    """The name that each row of the table in a section of the page starts with."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE))


def test_the_page_lists_every_private_import() -> None:
    assert first_cells("Private imports") == set(internals.__all__)
    exported = {name for name in vars(internals) if not name.startswith("__")} - {"annotations", "Any"}
    assert exported == set(internals.__all__)


def test_the_page_lists_every_patch() -> None:
    """A patch assigns to an attribute of a private module, which the code calls `module`."""
    patched = set()
    for path in (PACKAGE / "jaxcore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            patched |= {
                leaf.attr
                for target in targets
                for leaf in getattr(target, "elts", [target])
                if isinstance(leaf, ast.Attribute)
                and ast.unparse(leaf.value) in ("module", *internals.__all__)
            }
    listed = first_cells("Patched while a policy is active")
    assert patched == {name.split(".")[1] for name in listed}
    assert {name.split(".")[0] for name in listed} <= set(internals.__all__)


def private_names(path: Path) -> set[str]:
    """The attributes that a module takes of private modules of JAX."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "policyc.jaxcore.internals"
        for alias in node.names
    }
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }
