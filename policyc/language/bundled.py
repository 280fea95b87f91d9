"""Finds and reads policy files, and the data that ships with policyc: grammars, policies and models.

An installed wheel has the data folders inside the package. In a checkout they are next to it.
"""

from __future__ import annotations

from pathlib import Path

from policyc.base.files import read_file
from policyc.base.text import closest_name
from policyc.language.diagnostics import Diagnostic, PolicyError, SourceText, Span

POLICY_SUFFIX = ".policy"
MAX_FILE_BYTES = 16 * 2**20
RECOMMENDED = "recommended"
"""Names the bundled policy that is chosen for a program and a GPU, where a command has both."""

_PACKAGE = Path(__file__).parent.parent


def data_folder(name: str) -> Path:
    """Returns the path of a data folder: `grammars`, `policies` or `models`."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def bundled_policies() -> dict[str, Path]:
    """Returns the paths of the bundled policies by name."""
    return {path.stem: path for path in sorted(data_folder("policies").glob(f"*{POLICY_SUFFIX}"))}


def locate(policy: str | Path) -> Path:
    """Returns the path of a policy that is given by path or by bundled name."""
    path = Path(policy)
    bundled_paths = bundled_policies()
    name = path.name.removesuffix(POLICY_SUFFIX)
    try:
        if path.is_file() or (path.exists() and str(policy) not in bundled_paths):
            return path
    except (OSError, ValueError) as error:
        raise unreadable_file_error(str(policy), str(error)) from None
    if path.parent == Path() and name in bundled_paths:
        return bundled_paths[name]
    variants = sorted((n for n in bundled_paths if name in n.split("_")), key=len)[:2]
    similar = variants or [n for n in [closest_name(name, bundled_paths)] if n]
    help = f"bundled policies: {', '.join(bundled_paths)}"
    if name == RECOMMENDED:
        help = "it is chosen for a program and a GPU, by apply, diff, estimate, lint and init"
    elif similar:
        help = f"did you mean {' or '.join(map(repr, similar))}?"
    raise unreadable_file_error(str(policy), "no such file, and no bundled policy of that name", help)


def read_policy_text(path: Path) -> str:
    """Reads the text of a policy file. Raises PolicyError if it is not a UTF-8 file of a sensible size."""
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except IsADirectoryError:
        help = f"name a file that ends in '{POLICY_SUFFIX}'"
        raise unreadable_file_error(str(path), "this is a directory, not a policy", help) from None
    except PermissionError:
        raise unreadable_file_error(str(path), "no permission to read this file") from None
    except (OSError, ValueError) as error:
        raise unreadable_file_error(str(path), getattr(error, "strerror", None) or str(error)) from None
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
        raise unreadable_file_error(str(path), reason, "save it as UTF-8") from None


def unreadable_file_error(path: str, reason: str, help: str = "") -> PolicyError:
    """Returns the error for a file that could not be read at all."""
    span = Span(SourceText("", path), 0, 0)
    return PolicyError([Diagnostic(code="unreadable-file", message=reason, span=span, help=help)])


def resolve_links(path: Path) -> Path:
    """Returns the path without symbolic links, to tell whether two paths are the same file."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a cycle of links, or not a valid path
        return path
