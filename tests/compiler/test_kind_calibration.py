"""How far a kind can be trusted: kinds of models whose true kinds are known by construction."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from policyc.compiler.sites import Site
from tests.support import kind_programs
from tests.support.calibration_programs import PROGRAMS, truth
from tests.support.jaxpr_tools import find_sites

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sites.md"


def level(site: Site, true_kind: str) -> str:
    """What policyc says of the kind of a site, and whether that is so."""
    if site.kind.possible:
        assert not site.kind.name
        is_right, said = not true_kind or true_kind in site.kind.possible, "left open"
    else:
        is_right = site.kind.name == true_kind
        said = "named" if "its names say so" in site.kind.reason else "certain"
    return said if is_right else f"{said}, but wrong"


def levels_of(name: str) -> Counter[str]:
    loss, arguments = PROGRAMS[name]
    return Counter(level(site, truth(site)) for site in find_sites(loss, *arguments))


@pytest.mark.any_jax
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kind_is_wrong(name: str) -> None:
    assert levels_of(name).keys() <= {"certain", "left open"}


@pytest.mark.any_jax
def test_the_documentation_says_how_many_kinds_are_certain() -> None:
    counts = Counter[str]()
    for program in kind_programs.PROGRAMS:
        sites = zip(kind_programs.sites_of(program.name), program.expected, strict=True)
        counts.update(level(site, kind) for site, (kind, _) in sites)
    for name in PROGRAMS:
        counts += levels_of(name)
    programs = len(PROGRAMS) + len(kind_programs.PROGRAMS)
    print("\n".join(f"{count:>6} {said}" for said, count in counts.items()))
    assert counts.keys() == {"certain", "left open"}
    sentence = (
        f"In {programs} programs of the tests with {counts.total()} sites, whose true kinds are known, "
        f"{counts['certain']} sites have a certain kind or certainly none, and none of these is wrong. "
        f"The kinds of the other {counts['left open']} are left open"
    )
    assert sentence in " ".join(PAGE.read_text(encoding="utf-8").split())
