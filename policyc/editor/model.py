"""Finds the sites of the model that a policy is for, which a comment in the policy or the project's settings names."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from policyc.base.files import user_cache_folder
from policyc.compiler.site_lists import BadSiteList, SiteList
from policyc.linter.settings import BadSettings, Settings, read_settings

_COMMENT = re.compile(r"^[ \t]*#[ \t]*(sites|program):[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)

_RUN_SECONDS = 600  # for a program that lists its sites


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSource:
    """The source of a model's sites: a file, or a program, whose list of sites is kept in the user's cache folder."""

    file: Path | None = None
    program: tuple[str, ...] = ()
    folder: Path = Path()
    place: tuple[int, int] = (0, 0)
    """The start and the end of the comment that names the source; the start of the text if the settings name it."""

    @property
    def path(self) -> Path | None:
        """The file to read; None without a source. The file of a program may not exist yet."""
        if not self.program:
            return self.file
        key = hashlib.sha256("\0".join((str(self.folder.absolute()), *self.program)).encode()).hexdigest()
        return user_cache_folder() / "sites" / f"{key[:32]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The project's settings and the model's sites. `sites` is None if there is no valid list of them."""

    settings: Settings
    source: SiteSource
    sites: SiteList | None = None
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
    source = _find_source(text, path, settings)
    try:
        sites = _read_sites(source)
    except BadSiteList as error:
        problems.append((source.place, f"'{source.path}': {error}"))
    return Model(settings=settings, source=source, sites=sites, problems=tuple(problems))


def _find_source(text: str, path: Path | None, settings: Settings) -> SiteSource:
    """The source that a comment names, or else the settings. A path in a comment is relative to the policy."""
    folder = path.parent if path is not None else Path()
    for match in _COMMENT.finditer(text):
        place = match.start(1), match.end(2)
        if match[1] == "sites" and match[2]:
            return SiteSource(file=folder / match[2], folder=folder, place=place)
        try:
            words = tuple(shlex.split(match[2]))
        except ValueError:  # a quote is still open
            continue
        if words:
            return SiteSource(program=words, folder=folder, place=place)
    if settings.sites:
        return SiteSource(file=settings.folder / settings.sites, folder=settings.folder)
    return SiteSource(program=settings.program, folder=settings.folder)


def _read_sites(source: SiteSource) -> SiteList | None:
    """Reads the list of sites; None without one. An editor runs no programs on its own, so theirs may not exist yet."""
    path = source.path
    if path is None or (source.program and not path.is_file()):
        return None
    try:
        return _read_file(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):  # no such file, or not a valid path: `read` raises BadSiteList
        return SiteList.read(path)


@lru_cache(maxsize=8)
def _read_file(path: Path, changed: int) -> SiteList:
    del changed  # only tells versions of the file apart
    return SiteList.read(path)


def list_sites(source: SiteSource) -> str:
    """Runs the program of a policy until its first loss is traced, and saves the list of its sites.

    Returns an error message; empty on success.
    """
    if source.path is None or not source.program:
        return "no program: write '# program: train.py' in the policy"
    words = [sys.executable, "-m", "policyc", "sites", "--format", "json", "--out", str(source.path)]
    env = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    source.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = subprocess.run(
            [*words, *source.program],
            cwd=source.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the sites could not be listed: {error}"
    return "" if result.returncode == 0 else f"the sites could not be listed: {result.stderr.strip()[-1000:]}"
