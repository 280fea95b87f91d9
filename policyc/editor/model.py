"""Finds the list of sites of a policy's model, which a comment in the policy or the project's settings names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from policyc.compiler.sites.site_list import Sites
from policyc.compiler.tables.plan_json import BadSiteList, read_sites
from policyc.linter.settings import BadSettings, Settings, read_settings

_COMMENT = re.compile(r"^[ \t]*#[ \t]*(sites:[ \t]*(\S.*?))[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The project's settings and the model's sites. `sites` is None if there is no valid list of them."""

    settings: Settings
    sites: Sites | None = None
    problems: tuple[tuple[tuple[int, int], str], ...] = ()
    """Errors in the settings or the list, each with the start and the end of the text to report it at."""


def find_model(text: str, path: Path | None) -> Model:
    """Reads the settings of a policy's project, and the list of sites that they or a comment name."""
    settings, sites, problems = Settings(), None, []
    if path is not None:
        try:
            settings = read_settings(path.parent)
        except BadSettings as error:
            problems.append(((0, 0), str(error)))
    comment = _COMMENT.search(text)
    place = comment.span(1) if comment else (0, 0)
    name, folder = (
        (comment[2], path.parent if path else Path()) if comment else (settings.sites, settings.folder)
    )
    if name:
        try:
            sites = _read_sites(folder / name)
        except BadSiteList as error:
            problems.append((place, f"'{folder / name}': {error}"))
    return Model(settings=settings, sites=sites, problems=tuple(problems))


def _read_sites(path: Path) -> Sites:
    try:
        changed = path.stat().st_mtime_ns
    except (OSError, ValueError):  # no such file, or not a valid path: `read_sites` raises BadSiteList
        return read_sites(path)
    return _read_version(path, changed)


@lru_cache(maxsize=8)
def _read_version(path: Path, changed: int) -> Sites:
    del changed  # only tells versions of the file apart
    return read_sites(path)
