"""Statements -> Policy: imports expanded, variants apart.

In: a text, a path or the name of a bundled policy. Out: a `Policy`, or a `PolicyError` with every fault. The
one trap: an import is looked for beside the importing file, then among the bundled policies. Its path is relative and
ends in `.policy`: no import reads any other file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from policyc.language import bundled
from policyc.language.checks import Definitions, DiagnosticCollector, check
from policyc.language.diagnostics import Diagnostic, Note, PolicyError, SourceText, Span, closest_name
from policyc.language.formats import FORMATS
from policyc.language.parser import (
    MAX_FILE_BYTES,
    BlockStatement,
    ImportStatement,
    PolicyFile,
    Statement,
    read_statements,
)
from policyc.language.policy import Policy, RecipeDef, Rule, Variant
from policyc.language.schedule import StepCondition

_MOST_IMPORTS = 256
_RESERVED = frozenset(FORMATS) | {"split"}


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy that may be faulty: what could be read of it, and its faults."""

    policy: Policy
    file: PolicyFile
    diagnostics: tuple[Diagnostic, ...]


def parse(text: str, *, path: str | Path | None = None) -> Policy:
    """The policy that a text spells. `path` is where it came from: imports are relative to it."""
    return _whole(parse_with_diagnostics(text, path=path))


def load(policy: str | Path) -> Policy:
    """The policy in a file, or the bundled policy of that name."""
    path = locate(policy)
    return _whole(parse_with_diagnostics(read_policy_text(path), path=path))


def parse_with_diagnostics(
    text: str, *, path: str | Path | None = None, shown: str | None = None
) -> LoadedPolicy:
    """Like `parse`, but hands back the faults instead of raising them. `shown` is the path to print."""
    source = SourceText(text.removeprefix("\ufeff"), shown or (str(path) if path is not None else "<policy>"))
    loader = _Loader()
    file = loader.read(source)
    loader.expand(file.statements, None if path is None else Path(path))
    policy = loader.policy(source)
    return LoadedPolicy(policy, file, tuple(sorted(dict.fromkeys(loader.found), key=lambda d: d.sort_key)))


def locate(policy: str | Path) -> Path:
    """The path of a policy given by path or by bundled name."""
    path = Path(policy)
    known = bundled.bundled_policies()
    name = path.name.removesuffix(bundled.POLICY_SUFFIX)
    try:
        if path.is_file() or (path.exists() and str(policy) not in known):
            return path
    except (OSError, ValueError) as error:
        raise unreadable_file_error(str(policy), str(error)) from None
    if path.parent == Path() and name in known:
        return known[name]
    near = closest_name(name, known)
    help = f"did you mean '{near}'?" if near else f"bundled policies: {', '.join(known)}"
    raise unreadable_file_error(str(policy), "no such file, and no bundled policy of that name", help)


def read_policy_text(path: Path) -> str:
    """The text of a policy file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise unreadable_file_error(str(path), "this is a directory", "name the policy file in it") from None
    except PermissionError:
        raise unreadable_file_error(str(path), "no permission to read this file") from None
    except (OSError, ValueError) as error:
        raise unreadable_file_error(str(path), getattr(error, "strerror", None) or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise unreadable_file_error(str(path), f"larger than {MAX_FILE_BYTES >> 20} MiB: this is no policy")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
        raise unreadable_file_error(str(path), reason, "save it as UTF-8") from None


def unreadable_file_error(path: str, reason: str, help: str = "") -> PolicyError:
    """The error for a file that could not be read at all."""
    span = Span(SourceText("", path), 0, 0)
    return PolicyError([Diagnostic(code="unreadable-file", message=reason, span=span, help=help)])


def _whole(loaded: LoadedPolicy) -> Policy:
    if loaded.diagnostics:
        raise PolicyError(loaded.diagnostics)
    return loaded.policy


class _Loader(DiagnosticCollector):
    def __init__(self) -> None:
        super().__init__()
        self.base = Definitions()
        self.variants: dict[str, tuple[Span, Definitions]] = {}
        self._files: dict[Path, PolicyFile | None] = {}
        self._imports = 0

    def read(self, source: SourceText) -> PolicyFile:
        file, found = read_statements(source)
        self.found += found
        return file

    def policy(self, source: SourceText) -> Policy:
        check(self, self.base, [scope for _, scope in self.variants.values()])
        return Policy(
            rules=tuple(self.base.rules),
            recipes=tuple(self.base.recipes.values()),
            variants=tuple(
                Variant(name=name, recipes=tuple(s.recipes.values()), rules=tuple(s.rules), span=span)
                for name, (span, s) in self.variants.items()
            ),
            source=source,
        )

    # ---- statements

    def expand(self, statements: tuple[Statement, ...], path: Path | None) -> None:
        """Take in the statements of a file."""
        trail = () if path is None else (_real(path),)
        self._file(statements, self.base, None if path is None else path.parent, trail)

    def _file(
        self,
        statements: tuple[Statement, ...],
        scope: Definitions,
        folder: Path | None,
        trail: tuple[Path, ...],
        imported: bool = False,
    ) -> None:
        """The statements of one file, into a scope: those of a variant go into a scope of their own.

        A variant that imports a policy takes its rules and recipes, not its variants.
        """
        mine: dict[str, Span] = {}
        variants: dict[str, Span] = {}
        for statement in statements:
            match statement:
                case ImportStatement():
                    self._import(statement, scope, folder, trail)
                    self._lost(statement, scope, mine)
                case RecipeDef():
                    self._define(statement, scope, mine)
                case Rule():
                    scope.rules.append(statement)
                case BlockStatement(header=StepCondition() as when):
                    self._schedule(statement, (when,), scope)
                case BlockStatement(header=str() as name):
                    if scope is not self.base:
                        if not imported:
                            self._misplaced(statement.span, "a variant", "a variant")
                    elif name in variants:
                        note = Note(variants[name], "first defined here")
                        self.fault(
                            "duplicate-variant",
                            statement.span,
                            f"a second variant '{name}'",
                            "name it otherwise, or remove one of the two",
                            notes=(note,),
                        )
                    else:
                        variants[name] = statement.span
                        self.variants[name] = (statement.span, Definitions())
                        self._file(statement.body, self.variants[name][1], folder, trail)

    def _define(self, definition: RecipeDef, scope: Definitions, mine: dict[str, Span]) -> None:
        name = definition.name
        if name in _RESERVED:
            help = f"name it otherwise: my_{name}"
            self.fault("reserved-name", definition.span, f"'{name}' is a name of the language", help)
        elif name in mine:
            note = Note(mine[name], "first defined here")
            help = "name it otherwise, or remove one of the two"
            self.fault("duplicate-recipe", definition.span, f"a second recipe '{name}'", help, notes=(note,))
        else:
            mine[name] = definition.span
            scope.recipes[name] = definition

    def _lost(self, statement: ImportStatement, scope: Definitions, mine: dict[str, Span]) -> None:
        """An import replaces what stands before it: a recipe that the file itself defines there is lost."""
        for name, span in tuple(mine.items()):
            if scope.recipes[name].span is not span:
                del mine[name]  # reported once, however many imports follow
                note = Note(scope.recipes[name].span, "defined again here")
                message = f"the import replaces the recipe '{name}' that this file defines before it"
                self.fault(
                    "duplicate-recipe", statement.span, message, "import first, then redefine", notes=(note,)
                )

    def _schedule(self, block: BlockStatement, when: tuple[StepCondition, ...], scope: Definitions) -> None:
        for statement in block.body:
            match statement:
                case Rule():
                    scope.rules.append(replace(statement, when=when))
                case BlockStatement(header=StepCondition() as inner):
                    self._schedule(statement, (*when, inner), scope)
                case ImportStatement():
                    self._misplaced(statement.span, "an import", "a schedule")
                case RecipeDef():
                    self._misplaced(statement.span, "a recipe", "a schedule")
                case BlockStatement():
                    self._misplaced(statement.span, "a variant", "a schedule")

    def _misplaced(self, span: Span, what: str, where: str) -> None:
        self.fault(
            "misplaced-statement", span, f"{what} cannot stand inside {where}", "move it out of the braces"
        )

    # ---- imports

    def _import(
        self, statement: ImportStatement, scope: Definitions, folder: Path | None, trail: tuple[Path, ...]
    ) -> None:
        path = self._find(statement, folder)
        if path is None:
            return
        real = _real(path)
        self._imports += 1
        if real in trail:
            chain = " -> ".join(p.name for p in (*trail[trail.index(real) :], real))
            self.fault(
                "import-cycle", statement.span, f"this file imports itself: {chain}", "break the circle"
            )
        elif self._imports > _MOST_IMPORTS:
            if self._imports == _MOST_IMPORTS + 1:
                help = "import each file once"
                self.fault(
                    "too-many-imports", statement.span, f"more than {_MOST_IMPORTS} imports in all", help
                )
        else:
            file = self._open(path, statement)
            if file is not None:
                self._file(file.statements, scope, path.parent, (*trail, real), imported=True)

    def _open(self, path: Path, statement: ImportStatement) -> PolicyFile | None:
        real = _real(path)
        if real not in self._files:
            self._files[real] = None
            note = Note(statement.span, "imported from here")
            before = len(self.found)
            try:
                self._files[real] = self.read(
                    SourceText(read_policy_text(path).removeprefix("\ufeff"), str(path))
                )
            except PolicyError as error:
                self.found += error.diagnostics
            self.found[before:] = [replace(d, notes=(*d.notes, note)) for d in self.found[before:]]
        return self._files[real]

    def _find(self, statement: ImportStatement, folder: Path | None) -> Path | None:
        written = statement.path
        pure = PurePosixPath(written)
        if not written.strip() or pure.is_absolute() or any(c in written for c in "\\:\0~"):
            help = "write a path relative to this file, with '/' between folders"
            self.fault("bad-import-path", statement.span, f"'{written}' is not a relative path", help)
            return None
        if pure.suffix not in ("", bundled.POLICY_SUFFIX):
            help = f"policies end in '{bundled.POLICY_SUFFIX}'"
            self.fault("bad-import-path", statement.span, f"'{pure.name}' is not the name of a policy", help)
            return None
        relative = written if pure.suffix else written + bundled.POLICY_SUFFIX
        places = [*([folder] if folder is not None else []), bundled.data_folder("policies")]
        for place in places:
            try:
                if (place / relative).is_file():
                    return place / relative
            except OSError:  # a name that the file system cannot hold is a name that is not there
                continue
        name = pure.name.removesuffix(bundled.POLICY_SUFFIX)
        looked = "beside this file or among the bundled policies" if folder else "among the bundled policies"
        help = self.suggest(name, bundled.bundled_policies()) or "check the path"
        self.fault("import-not-found", statement.span, f"no '{relative}' {looked}", help)
        return None


def _real(path: Path) -> Path:
    """What a file is called without its links, to tell whether two are one."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, or not a path at all
        return path
