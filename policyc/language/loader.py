"""Loads policies: reads files, expands imports, separates variants, checks names.

An import is looked up next to the importing file, then among the bundled policies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from policyc.base.text import did_you_mean
from policyc.language import bundled
from policyc.language.bundled import locate, read_policy_text, resolve_links
from policyc.language.checks import Definitions, DiagnosticCollector, check_definitions
from policyc.language.diagnostics import Diagnostic, Note, PolicyError, SourceText, Span
from policyc.language.formats import FORMATS
from policyc.language.groups import GroupDef
from policyc.language.parser import (
    MAX_DEPTH,
    BlockStatement,
    ImportStatement,
    PolicyFile,
    Statement,
    VersionStatement,
    read_statements,
)
from policyc.language.policy import Policy, RecipeDef, Rule, Seed, Variant
from policyc.language.schedule import StepCondition

_RESERVED = frozenset(FORMATS) | {"split"}
_NAMES: dict[type, str] = {
    VersionStatement: "a version line",
    ImportStatement: "an import",
    RecipeDef: "a recipe",
    GroupDef: "a group",
    Seed: "a seed",
    BlockStatement: "a variant",
}

_Definitions = dict[tuple[str, str], Span]
"""The definitions of one file so far, by kind and name. The name of a seed is empty."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy and its diagnostics. If there are diagnostics, the policy holds only the part that could be read.

    `imports` are the files that it imports, directly or indirectly, in the order in which they were read.
    """

    policy: Policy
    file: PolicyFile
    diagnostics: tuple[Diagnostic, ...]
    imports: tuple[PolicyFile, ...] = ()


def parse(text: str, *, path: str | Path | None = None) -> Policy:
    """Parses the text of a policy.

    Args:
      text: the text.
      path: the file that the text comes from: imports are relative to it.

    Returns:
      The policy, with its imports expanded.

    Raises:
      PolicyError: the text has errors. The exception has all of them.
    """
    return _require_valid(parse_with_diagnostics(text, path=path))


def load(policy: str | Path) -> Policy:
    """Loads a policy from a file, or a bundled one by its name.

    Args:
      policy: a path or the name of a bundled policy. `name:variant` applies one of its variants.

    Returns:
      The policy, with its imports expanded.

    Raises:
      PolicyError: there is no such file or variant, or the text has errors. The exception has all of them.
    """
    name, variant = split_variant(policy)
    path = locate(name)
    loaded = _require_valid(parse_with_diagnostics(read_policy_text(path), path=path))
    return loaded if variant is None else loaded.variant(variant)


def is_policy_text(policy: object) -> bool:
    """Whether the argument is the text of a policy, not a path or a name."""
    return isinstance(policy, str) and ("->" in policy or "\n" in policy)


def split_variant(policy: str | Path) -> tuple[str | Path, str | None]:
    """Splits `llama_nvfp4:no_rht` into policy and variant. The variant is None if there is none or the path exists."""
    name, colon, variant = str(policy).rpartition(":")
    return (name, variant) if colon and name and not _exists(policy) else (policy, None)


def _exists(policy: str | Path) -> bool:
    try:
        return Path(policy).exists()
    except (OSError, ValueError):  # too long, or with a NUL character: `locate` reports it
        return False


def parse_with_diagnostics(
    text: str, *, path: str | Path | None = None, shown: str | None = None
) -> LoadedPolicy:
    """Parses the text of a policy, and returns the diagnostics instead of raising them.

    `shown` is the path to print in messages, if it differs from `path`.
    """
    source = SourceText(text.removeprefix("\ufeff"), shown or (str(path) if path is not None else "<policy>"))
    return load_file(*read_statements(source), path=path)


def load_file(
    file: PolicyFile, diagnostics: tuple[Diagnostic, ...] = (), *, path: str | Path | None = None
) -> LoadedPolicy:
    """Builds the policy of a file that has been read, with these diagnostics."""
    loader = _Loader()
    loader.diagnostics += diagnostics
    loader.expand(file.statements, None if path is None else Path(path))
    policy = loader.build_policy(file.source)
    found = sorted(dict.fromkeys(loader.diagnostics), key=lambda d: d.sort_key)
    found = [
        d for d in found if d.code == "unknown-version"
    ] or found  # other errors may be statements of that version
    return LoadedPolicy(policy, file, tuple(found), loader.imports)


def _require_valid(loaded: LoadedPolicy) -> Policy:
    if loaded.diagnostics:
        raise PolicyError(loaded.diagnostics)
    return loaded.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileContext:
    """The file whose statements are being expanded.

    Attributes:
      folder: where its imports are looked up first; None for a text that is not a file.
      import_chain: the files from the main file to this one, with links resolved.
      is_imported: whether the statements are imported. False in a variant, where another variant is an error.
    """

    folder: Path | None = None
    import_chain: tuple[Path, ...] = ()
    is_imported: bool = False


@lru_cache(maxsize=64)  # an editor loads a policy, with its imports, after each key
def _read_imported(text: str, path: str) -> tuple[PolicyFile, tuple[Diagnostic, ...]]:
    return read_statements(SourceText(text, path))


class _Loader(DiagnosticCollector):
    """Collects the definitions of a policy and of its variants from the main file and its imports."""

    def __init__(self) -> None:
        super().__init__()
        self._base = Definitions()
        self._variants: dict[str, tuple[Span, Definitions]] = {}
        self._files: dict[Path, PolicyFile | None] = {}

    @property
    def imports(self) -> tuple[PolicyFile, ...]:
        return tuple(file for file in self._files.values() if file is not None)

    def expand(self, statements: tuple[Statement, ...], path: Path | None) -> None:
        """Collects the statements of the main file, and of the files it imports."""
        context = _FileContext()
        if path is not None:
            context = _FileContext(folder=path.parent, import_chain=(resolve_links(path),))
        self._add_statements(statements, self._base, context)

    def build_policy(self, source: SourceText) -> Policy:
        """Checks the statements collected so far, and returns the policy."""
        self._report_changed_groups()
        check_definitions(self, self._base, [definitions for _, definitions in self._variants.values()])
        return Policy(
            rules=tuple(self._base.rules),
            recipes=tuple(self._base.recipes.values()),
            variants=tuple(
                Variant(
                    name=name,
                    recipes=tuple(d.recipes.values()),
                    rules=tuple(d.rules),
                    seed_statement=d.seed,
                    span=span,
                )
                for name, (span, d) in self._variants.items()
            ),
            seed_statement=self._base.seed,
            source=source,
        )

    # ---- statements

    def _add_statements(
        self, statements: tuple[Statement, ...], target: Definitions, context: _FileContext
    ) -> None:
        """Adds the statements of one file, or of one variant in it, to `target`.

        Each variant gets definitions of its own. A variant that imports a policy takes the rules and recipes of that
        policy, but not its variants.
        """
        own: _Definitions = {}
        for number, statement in enumerate(statements):
            match statement:
                case VersionStatement() if number or not (target is self._base or context.is_imported):
                    message = "the version of the language is not in the first statement of its file"
                    self.report("misplaced-statement", statement.span, message, "move it to the first line")
                case ImportStatement():
                    self._add_import(statement, target, context)
                    self._report_replaced(statement, target, own)
                case Seed():
                    self._is_first("seed", "", statement.span, own)
                    target.seed, own["seed", ""] = statement, statement.span
                case RecipeDef(name=name) if name in _RESERVED:
                    message = f"'{name}' is a reserved word"
                    self.report("reserved-name", statement.span, message, f"choose another name: my_{name}")
                case RecipeDef(name=name):
                    if self._is_first("recipe", name, statement.span, own):
                        target.recipes[name] = statement
                case GroupDef(name=name):
                    self._is_first("group", name, statement.span, own)
                    target.groups[name] = statement
                case Rule():
                    target.rules.append(statement)
                case BlockStatement(header=StepCondition() as condition):
                    self._add_schedule(statement, (condition,), target)
                case BlockStatement(header=str() as name) if target is self._base:
                    if self._is_first("variant", name, statement.span, own):
                        definitions = Definitions()
                        self._variants[name] = (statement.span, definitions)
                        self._add_statements(statement.body, definitions, replace(context, is_imported=False))
                case BlockStatement() if not context.is_imported:
                    self._report_misplaced(statement, "a variant")

    def _is_first(self, kind: str, name: str, span: Span, own: _Definitions) -> bool:
        """Returns whether a definition is the first in its file, and reports a second one. `own` are those so far."""
        first = own.setdefault((kind, name), span)
        if first is not span:
            message = f"the {kind} '{name}' is already defined" if name else f"the {kind} is already set"
            help = "choose another name, or remove one of the two" if name else "remove one of the two"
            self.report(f"duplicate-{kind}", span, message, help, notes=(Note(first, "first defined here"),))
        return first is span

    def _report_changed_groups(self) -> None:
        """Reports groups of the policy that a variant redefines: the rules of the policy would not use the new ones."""
        for variant, definitions in self._variants.values():
            for name, group in definitions.groups.items():
                first = self._base.groups.get(name)
                if first is not None and group.span.source is variant.source:
                    message = f"a variant cannot redefine the group '{name}' of its policy"
                    help = "give it another name, and add rules that use it"
                    notes = (Note(first.span, "first defined here"),)
                    self.report("duplicate-group", group.span, message, help, notes=notes)

    def _report_replaced(self, statement: ImportStatement, target: Definitions, own: _Definitions) -> None:
        """Reports definitions of this file that a later import replaces, each of them once."""
        for (kind, name), span in tuple(own.items()):
            if kind == "seed" and target.seed is not None and target.seed.span is not span:
                self._is_first(kind, name, statement.span, own)
                del own[kind, name]
            elif kind == "recipe" and target.recipes[name].span is not span:
                del own[kind, name]
                note = Note(target.recipes[name].span, "defined again here")
                message = f"this import replaces the recipe '{name}', which this file defines above it"
                help = "import first, then redefine"
                self.report("duplicate-recipe", statement.span, message, help, notes=(note,))

    def _add_schedule(
        self, block: BlockStatement, conditions: tuple[StepCondition, ...], target: Definitions
    ) -> None:
        """Adds the rules of an `after` or `until` block. `conditions` are all that apply to them, outermost first."""
        for statement in block.body:
            match statement:
                case Rule():
                    target.rules.append(replace(statement, when=conditions))
                case BlockStatement(header=StepCondition() as inner):
                    self._add_schedule(statement, (*conditions, inner), target)
                case _:
                    self._report_misplaced(statement, "a schedule")

    def _report_misplaced(self, statement: Statement, container: str) -> None:
        message = f"{_NAMES[type(statement)]} is not allowed inside {container}"
        self.report("misplaced-statement", statement.span, message, "move it out of the braces")

    # ---- imports

    def _add_import(self, statement: ImportStatement, target: Definitions, context: _FileContext) -> None:
        path = self._find_import(statement, context.folder)
        if path is None:
            return
        resolved, chain = resolve_links(path), context.import_chain
        if resolved in chain:
            cycle = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
            message = f"this file imports itself: {cycle}"
            self.report("import-cycle", statement.span, message, "remove one of these imports")
        elif len(chain) > MAX_DEPTH:
            message = f"imports are nested more than {MAX_DEPTH} deep"
            self.report("nested-too-deep", statement.span, message, "import the last file directly")
        else:
            file = self._read_import(path, statement)
            if file is not None:
                inner = _FileContext(folder=path.parent, import_chain=(*chain, resolved), is_imported=True)
                self._add_statements(file.statements, target, inner)

    def _read_import(self, path: Path, statement: ImportStatement) -> PolicyFile | None:
        """Reads an imported file once. Its diagnostics get a note that points at the import."""
        resolved = resolve_links(path)
        if resolved not in self._files:
            self._files[resolved] = None
            note = Note(statement.span, "imported from here")
            before = len(self.diagnostics)
            try:
                text = read_policy_text(path).removeprefix("\ufeff")
                self._files[resolved], diagnostics = _read_imported(text, str(path))
                self.diagnostics += diagnostics
            except PolicyError as error:
                self.diagnostics += error.diagnostics
            self.diagnostics[before:] = [
                replace(d, notes=(*d.notes, note)) for d in self.diagnostics[before:]
            ]
        return self._files[resolved]

    def _find_import(self, statement: ImportStatement, folder: Path | None) -> Path | None:
        """Returns the path of an imported file. Reports an invalid path, or a file that does not exist."""
        written = statement.path
        pure = PurePosixPath(written)
        if not written.strip() or pure.is_absolute() or any(c in written for c in "\\:\0~"):
            help = "write a path relative to this file, with '/' between folders"
            self.report("bad-import-path", statement.span, f"'{written}' is not a relative path", help)
            return None
        if pure.suffix not in ("", bundled.POLICY_SUFFIX):
            help = f"policies end in '{bundled.POLICY_SUFFIX}'"
            message = f"'{pure.name}' is not the name of a policy"
            self.report("bad-import-path", statement.span, message, help)
            return None
        relative = written if pure.suffix else written + bundled.POLICY_SUFFIX
        bundled_folder = bundled.data_folder("policies")
        for candidate in (bundled_folder,) if folder is None else (folder, bundled_folder):
            try:
                if (candidate / relative).is_file():
                    return candidate / relative
            except OSError:  # a name that the file system cannot hold does not exist
                continue
        name = pure.name.removesuffix(bundled.POLICY_SUFFIX)
        places = "next to this file or among the bundled policies" if folder else "among the bundled policies"
        help = did_you_mean(name, bundled.bundled_policies()) or "check the path"
        self.report("import-not-found", statement.span, f"no '{relative}' {places}", help)
        return None
