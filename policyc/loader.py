"""Statements -> Policy: imports expanded, names and options checked.

In: a text, a path or the name of a bundled policy. Out: a `Policy`, or a `PolicyError` with every fault. The
one trap: a recipe is looked up when the policy is whole, so that a file that imports another can redefine its
recipes.

An import is looked for beside the importing file, then among the bundled policies. Its path is relative and
ends in `.policy`: no import reads any other file.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from policyc import resources
from policyc.diagnostics import Diagnostic, Edit, Fix, Note, PolicyError, Source, Span, closest, did_you_mean
from policyc.formats import FORMATS
from policyc.parser import LONGEST, Block, File, Import, Statement, comments, read
from policyc.policy import Policy, RecipeDef, RecipeNode, Rule, Setting, Use, Variant, When, uses, values
from policyc.recipes import OPERANDS, OPTIONS
from policyc.selectors import alternatives

_MOST_IMPORTS = 256
_LONGEST_CHAIN = 32  # recipes named by recipes
_MOST_STEPS = 100_000  # from recipe to recipe, in all variants: each is checked against the whole policy
_MOST_ALTERNATIVES = 1024
_MOST_SUGGESTIONS = 50  # in one policy: looking for a close name costs more than anything else here
_RESERVED = frozenset(FORMATS) | {"split"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy that may be faulty: what could be read of it, and its faults."""

    policy: Policy
    file: File
    found: tuple[Diagnostic, ...]


def parse(text: str, *, path: str | Path | None = None) -> Policy:
    """The policy that a text spells. `path` is where it came from: imports are relative to it."""
    return _whole(inspect(text, path=path))


def load(policy: str | Path) -> Policy:
    """The policy in a file, or the bundled policy of that name."""
    path = locate(policy)
    return _whole(inspect(read_text(path), path=path))


def inspect(text: str, *, path: str | Path | None = None, shown: str | None = None) -> Loaded:
    """Like `parse`, but hands back the faults instead of raising them. `shown` is the path to print."""
    source = Source(text.removeprefix("\ufeff"), shown or (str(path) if path is not None else "<policy>"))
    loader = _Loader()
    file = loader.read(source)
    loader.expand(file.statements, None if path is None else Path(path))
    policy = loader.policy(source)
    return Loaded(policy, file, tuple(sorted(dict.fromkeys(loader.found), key=lambda d: d.order)))


def locate(policy: str | Path) -> Path:
    """The path of a policy given by path or by bundled name."""
    path = Path(policy)
    known = resources.bundled()
    name = path.name.removesuffix(resources.SUFFIX)
    try:
        if path.is_file() or (path.exists() and str(policy) not in known):
            return path
    except (OSError, ValueError) as error:
        raise unreadable(str(policy), str(error)) from None
    if path.parent == Path() and name in known:
        return known[name]
    near = closest(name, known)
    help = f"did you mean '{near}'?" if near else f"bundled policies: {', '.join(known)}"
    raise unreadable(str(policy), "no such file, and no bundled policy of that name", help)


def read_text(path: Path) -> str:
    """The text of a policy file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(LONGEST + 1)
    except IsADirectoryError:
        raise unreadable(str(path), "this is a directory", "name the policy file in it") from None
    except PermissionError:
        raise unreadable(str(path), "no permission to read this file") from None
    except (OSError, ValueError) as error:
        raise unreadable(str(path), getattr(error, "strerror", None) or str(error)) from None
    if len(data) > LONGEST:
        raise unreadable(str(path), f"larger than {LONGEST >> 20} MiB: this is no policy")
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
        raise unreadable(str(path), reason, "save it as UTF-8") from None


def unreadable(path: str, reason: str, help: str = "") -> PolicyError:
    """The error for a file that could not be read at all."""
    span = Span(Source("", path), 0, 0)
    return PolicyError([Diagnostic(code="unreadable-file", message=reason, span=span, help=help)])


def _whole(loaded: Loaded) -> Policy:
    if loaded.found:
        raise PolicyError(loaded.found)
    return loaded.policy


@dataclass(slots=True)
class _Scope:
    """What one policy, or one variant of it, defines. Rules come in the order in which they override."""

    recipes: dict[str, RecipeDef] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)


class _Loader:
    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self.base = _Scope()
        self.variants: dict[str, tuple[Span, _Scope]] = {}
        self._files: dict[Path, File | None] = {}
        self._imports = 0
        self._suggested = 0
        self._steps = 0

    def fault(self, code: str, span: Span, message: str, help: str = "", **more: object) -> None:
        self.found.append(Diagnostic(code=code, message=message, span=span, help=help, **more))  # type: ignore[arg-type]  # notes and fix

    def suggest(self, name: str, known: Iterable[str]) -> str:
        self._suggested += 1
        return did_you_mean(name, known) if self._suggested <= _MOST_SUGGESTIONS else ""

    def read(self, source: Source) -> File:
        file, found = read(source)
        self.found += found
        return file

    def policy(self, source: Source) -> Policy:
        known = {name: d.recipe for name, d in self.base.recipes.items()}
        self._check(self.base, known, list(self.base.recipes))
        self._steps = 0
        for _, scope in self.variants.values():
            changed = ChainMap({name: d.recipe for name, d in scope.recipes.items()}, known)
            self._check(scope, changed, list(scope.recipes))
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
        scope: _Scope,
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
                case Import():
                    self._import(statement, scope, folder, trail)
                    self._lost(statement, scope, mine)
                case RecipeDef():
                    self._define(statement, scope, mine)
                case Rule():
                    scope.rules.append(statement)
                case Block(header=When() as when):
                    self._schedule(statement, (when,), scope)
                case Block(header=str() as name):
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
                        self.variants[name] = (statement.span, _Scope())
                        self._file(statement.body, self.variants[name][1], folder, trail)

    def _define(self, definition: RecipeDef, scope: _Scope, mine: dict[str, Span]) -> None:
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

    def _lost(self, statement: Import, scope: _Scope, mine: dict[str, Span]) -> None:
        """An import replaces what stands before it: a recipe that the file itself defines there is lost."""
        for name, span in tuple(mine.items()):
            if scope.recipes[name].span is not span:
                del mine[name]  # reported once, however many imports follow
                note = Note(scope.recipes[name].span, "defined again here")
                message = f"the import replaces the recipe '{name}' that this file defines before it"
                self.fault(
                    "duplicate-recipe", statement.span, message, "import first, then redefine", notes=(note,)
                )

    def _schedule(self, block: Block, when: tuple[When, ...], scope: _Scope) -> None:
        for statement in block.body:
            match statement:
                case Rule():
                    scope.rules.append(replace(statement, when=when))
                case Block(header=When() as inner):
                    self._schedule(statement, (*when, inner), scope)
                case Import():
                    self._misplaced(statement.span, "an import", "a schedule")
                case RecipeDef():
                    self._misplaced(statement.span, "a recipe", "a schedule")
                case Block():
                    self._misplaced(statement.span, "a variant", "a schedule")

    def _misplaced(self, span: Span, what: str, where: str) -> None:
        self.fault(
            "misplaced-statement", span, f"{what} cannot stand inside {where}", "move it out of the braces"
        )

    # ---- imports

    def _import(self, statement: Import, scope: _Scope, folder: Path | None, trail: tuple[Path, ...]) -> None:
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

    def _open(self, path: Path, statement: Import) -> File | None:
        real = _real(path)
        if real not in self._files:
            self._files[real] = None
            note = Note(statement.span, "imported from here")
            before = len(self.found)
            try:
                self._files[real] = self.read(Source(read_text(path).removeprefix("\ufeff"), str(path)))
            except PolicyError as error:
                self.found += error.diagnostics
            self.found[before:] = [replace(d, notes=(*d.notes, note)) for d in self.found[before:]]
        return self._files[real]

    def _find(self, statement: Import, folder: Path | None) -> Path | None:
        written = statement.path
        pure = PurePosixPath(written)
        if not written.strip() or pure.is_absolute() or any(c in written for c in "\\:\0~"):
            help = "write a path relative to this file, with '/' between folders"
            self.fault("bad-import-path", statement.span, f"'{written}' is not a relative path", help)
            return None
        if pure.suffix not in ("", resources.SUFFIX):
            help = f"policies end in '{resources.SUFFIX}'"
            self.fault("bad-import-path", statement.span, f"'{pure.name}' is not the name of a policy", help)
            return None
        relative = written if pure.suffix else written + resources.SUFFIX
        places = [*([folder] if folder is not None else []), resources.folder("policies")]
        for place in places:
            try:
                if (place / relative).is_file():
                    return place / relative
            except OSError:  # a name that the file system cannot hold is a name that is not there
                continue
        name = pure.name.removesuffix(resources.SUFFIX)
        looked = "beside this file or among the bundled policies" if folder else "among the bundled policies"
        help = self.suggest(name, resources.bundled()) or "check the path"
        self.fault("import-not-found", statement.span, f"no '{relative}' {looked}", help)
        return None

    # ---- names and options

    def _check(self, scope: _Scope, known: Mapping[str, RecipeNode], changed: list[str]) -> None:
        for definition in scope.recipes.values():
            self._recipe(definition.recipe, known)
        for rule in scope.rules:
            self._recipe(rule.recipe, known)
            for selector in rule.selectors:
                if alternatives(selector) > _MOST_ALTERNATIVES:
                    message = f"these braces stand for more than {_MOST_ALTERNATIVES} selectors"
                    self.fault(
                        "too-many-alternatives", selector.span, message, "use '*' or '?' for some of them"
                    )
        depths: dict[str, int] = {}
        for name in changed:
            if scope is self.base or self._steps <= _MOST_STEPS:
                self._chain(name, known, depths)
                if scope is not self.base and self._steps > _MOST_STEPS:
                    message = "the recipes of the variants go through too many others"
                    self.fault("nested-too-deep", known[name].span, message, "name the last ones directly")

    def _chain(self, name: str, known: Mapping[str, RecipeNode], depths: dict[str, int]) -> None:
        """Follow a recipe through the recipes it names; a circle or a very long way is a fault."""
        stack: list[tuple[str, bool]] = [(name, False)]
        path: dict[str, None] = {}  # the names on the way here, in their order
        while stack:
            current, done = stack.pop()
            self._steps += 1
            inner = [u for u in uses(known[current]) if u.name in known]
            if done:
                path.popitem()
                depths[current] = 1 + max((depths.get(u.name, 0) for u in inner), default=0)
                continue
            if current in depths:
                continue
            depths[current] = 0
            path[current] = None
            stack.append((current, True))
            for use in inner:
                if use.name in path:
                    way = list(path)
                    circle = " -> ".join([*way[way.index(use.name) :], use.name])
                    help = "one of them must end in a format"
                    self.fault("recipe-cycle", use.span, f"this recipe is made of itself: {circle}", help)
                    return
                stack.append((use.name, False))
        if depths[name] > _LONGEST_CHAIN:
            message = f"'{name}' goes through more than {_LONGEST_CHAIN} other recipes"
            self.fault("nested-too-deep", known[name].span, message, "name the last one directly")

    def _recipe(self, node: RecipeNode, known: Mapping[str, RecipeNode]) -> None:
        for use in uses(node):
            if use.name in known:
                if use.settings:
                    message = f"'{use.name}' is a named recipe: it takes no options"
                    self.fault(
                        "unknown-option",
                        use.settings[0].span,
                        message,
                        f"give them where '{use.name}' is defined",
                    )
            elif use.name in FORMATS:
                self._settings(use)
            else:
                self._unknown_recipe(use, known)

    def _unknown_recipe(self, use: Use, known: Mapping[str, RecipeNode]) -> None:
        self._suggested += 1
        near = closest(use.name, [*known, *FORMATS]) if self._suggested <= _MOST_SUGGESTIONS else None
        help = f"did you mean '{near}'?" if near else f"formats: {', '.join(FORMATS)}"
        edit = (
            Fix(message=f"replace it by '{near}'", edits=(_rename(use, near),), safe=False) if near else None
        )
        if use.settings or near in FORMATS:
            self.fault("unknown-format", _name(use), f"no format named '{use.name}'", help, fix=edit)
        else:
            self.fault("unknown-recipe", _name(use), f"no recipe named '{use.name}'", help, fix=edit)

    def _settings(self, use: Use) -> None:
        format = FORMATS[use.name]
        first: dict[str, Setting] = {}
        for before, setting in zip((None, *use.settings), use.settings, strict=False):
            name = setting.name
            if name not in format.options:
                self._unknown_option(use, setting)
            elif name in first and before is not None:
                self._duplicate(first[name], before, setting)
            elif OPTIONS[name].read(setting.words) is None:
                self._unknown_value(setting)
            first.setdefault(name, setting)
        for a, b, reason in _contradictions(use):
            notes = (Note(first[a].span, "with this one"),) if a != b else ()
            self.fault("contradictory-options", first[b].span, reason, "drop one of the two", notes=notes)

    def _unknown_option(self, use: Use, setting: Setting) -> None:
        format, name = FORMATS[use.name], setting.name
        owners = [f.name for f in FORMATS.values() if name in f.options]
        if owners:
            help = f"it is an option of {', '.join(owners)}"
        elif format.options:
            help = self.suggest(name, format.options)
        else:
            help = f"'{format.name}' takes none"
        start = setting.span.start
        span = Span(setting.span.source, start, start + len(name))
        self.fault("unknown-option", span, f"'{format.name}' has no option '{name}'", help)

    def _unknown_value(self, setting: Setting) -> None:
        option = OPTIONS[setting.name]
        if not setting.words:
            self.fault(
                "unknown-value",
                setting.span,
                f"'{setting.name}' needs a value",
                f"expected {option.expected}",
            )
            return
        bad = next((w for w in setting.words if w not in option.choices), setting.words[0])
        near = closest(bad, option.choices)
        help = f"did you mean '{near}'?" if near else f"expected {option.expected}"
        self.fault("unknown-value", setting.span, f"'{setting.name}' cannot be '{bad}'", help)

    def _duplicate(self, first: Setting, before: Setting, second: Setting) -> None:
        same = first == second
        message = f"'{second.name}' is given twice" + ("" if same else ", and not the same")
        fix = Fix(message="remove the second", edits=_without(second, before), safe=same)
        note = Note(first.span, "first given here")
        self.fault("duplicate-option", second.span, message, "keep one", notes=(note,), fix=fix)


def _real(path: Path) -> Path:
    """What a file is called without its links, to tell whether two are one."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, or not a path at all
        return path


def _name(use: Use) -> Span:
    return Span(use.span.source, use.span.start, use.span.start + len(use.name))


def _rename(use: Use, name: str) -> Edit:
    return Edit(_name(use), name)


def _without(setting: Setting, before: Setting) -> tuple[Edit, ...]:
    """Takes an option out, with the comma between it and the one before; a comment there stays."""
    source, start, end = setting.span.source, before.span.end, setting.span.end
    between = source.text[start : setting.span.start]
    if "#" not in between:
        return (Edit(Span(source, start, end), ""),)
    noted = [range(*span) for span in comments(between)]
    comma = next(start + i for i, c in enumerate(between) if c == "," and not any(i in r for r in noted))
    return (Edit(Span(source, comma, comma + 1), ""), Edit(setting.span, ""))


def _contradictions(use: Use) -> Iterable[tuple[str, str, str]]:
    """Pairs of options of which only one can have its way."""
    given = {name: value for name, value in values(use).items() if name in FORMATS[use.name].options}
    for name in ("rht", "sr"):
        setting = next((s for s in use.settings if s.name == name), None)
        if setting is not None and "none" in setting.words and len(setting.words) > 1:
            yield name, name, f"'{name}' cannot be 'none' and something else"
    if given.get("rounding") == "ms_eden":
        if given.get("sr"):
            yield "rounding", "sr", "MS-EDEN rounds by itself: it leaves nothing to stochastic rounding"
        if given.get("rht"):
            yield "rounding", "rht", "MS-EDEN brings its own Hadamard transform"
        if given.get("scale2d"):
            yield "rounding", "scale2d", "MS-EDEN rotates its operands: a 2D-scaled weight is not rotated"
        if given.get("scale") == "four_over_six":
            yield "rounding", "scale", "MS-EDEN corrects its own scales: four_over_six cannot choose them"
    if given.get("scale") == "four_over_six" and given.get("sr") == frozenset(OPERANDS):
        yield "scale", "sr", "four_over_six is for operands rounded to nearest, and here is none"
    if given.get("scale2d") and given.get("outer") == "row":
        yield "scale2d", "outer", "a 16x16 tile spans rows: it cannot have a scale per row"
