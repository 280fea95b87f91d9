"""The records of a diff: linears, the products of their layers before and after, classes of layers, and totals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policyc.changes.matching import MatchedLoss
from policyc.compiler.sites.linears import full_name
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.numerics.backends.choice import PLAIN, Lowering


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductState:
    """How a product runs.

    Attributes:
      format: the format of the multiplication; the dtype of the program if the product is kept.
      formats: formats of both operands, in the order of `OPERANDS`; their dtypes if the product is kept.
      roles: roles of both operands: activation, weight or gradient; lhs, rhs or gradient in a GEMM without a weight.
      options: what happens to both operands beyond their formats, as `describe_options` writes it.
      is_kept: whether the product runs as in the program.
      seed: seed of stochastic rounding; None if nothing is rounded stochastically.
    """

    format: str
    formats: tuple[str, str]
    roles: tuple[str, str]
    options: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    is_kept: bool = False
    seed: int | None = None
    lowering: Lowering = PLAIN

    @property
    def operands(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Role, format and options of both operands."""
        return zip(self.roles, self.formats, self.options, strict=True)

    @property
    def numerics(self) -> tuple[Any, ...]:
        """What determines the numerical result of a product, independently of the machine.

        A bf16 product is the same whether a rule or the program asks for bf16. The recipe f32 multiplies at the highest
        precision, which a float32 program does not always do.
        """
        if self.lowering.backend:
            return self.formats, self.options, self.seed
        is_exact = not self.is_kept and "f32" in self.formats
        return self.formats, is_exact

    @property
    def is_emulated(self) -> bool:
        return bool(self.lowering.backend) and not self.lowering.native


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSide:
    """A product before or after: its state, the number of the rule that decided, and the predicted time and traffic."""

    state: ProductState
    rule: int | None
    overridden: tuple[int, ...]
    seconds: float
    moved_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductChange:
    """A product before and after."""

    gemm: Gemm
    before: ProductSide
    after: ProductSide

    @property
    def is_changed(self) -> bool:
        """Whether its numerics change. Another rule with the same effect is not a change."""
        return self.before.state.numerics != self.after.state.numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRange:
    """Consecutive layers of a linear that are treated alike. `first` and `last` are None if it is not in a stack."""

    first: int | None
    last: int | None
    site: Site
    layer: Layer
    """The layer of the site that represents all of them."""
    products: tuple[ProductChange, ...]
    quantization: tuple[float | None, float | None] = (None, None)
    """Predicted seconds that one layer spends on quantizing its operands, before and after."""

    @property
    def layers(self) -> range:
        """Its layers; empty if it is not in a stack."""
        return range(0) if self.first is None or self.last is None else range(self.first, self.last + 1)

    @property
    def count(self) -> int:
        return len(self.layers) or 1

    @property
    def is_changed(self) -> bool:
        return any(p.is_changed for p in self.products)

    def product(self, gemm: Gemm) -> ProductChange | None:
        return next((p for p in self.products if p.gemm is gemm), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A GEMM of the model in all layers of its stack: a row of the heat map.

    Attributes:
      stack: the path of its stack ("decoder.layers"); empty if it is in none.
      name: its path inside the stack, or the whole path.
      runs: its layers, grouped into runs that are treated alike.
    """

    stack: str
    name: str
    runs: tuple[LinearRange, ...]

    @property
    def full_name(self) -> str:
        """Its path without indices."""
        return full_name(self.stack, self.name)

    def run_at(self, layer: int | None) -> LinearRange:
        """The run that contains this layer; the first run for None."""
        return next(run for run in self.runs if run.first is None or layer is None or layer in run.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of layers, scanned or unrolled, with the numbers of its linears and the classes of its layers.

    A class is the ranges of layers that are treated alike, as (first, last).
    """

    name: str
    size: int
    linears: tuple[int, ...]
    classes: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One of the two versions: its label, and its policy, which is None for the program without a policy."""

    label: str
    policy: Policy | None
    seconds: float
    """Predicted time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of products, over all layers."""

    gemms: int
    products: int
    changed: int
    emulated: int
    opaque: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffData:
    """All data of a diff, independent of the output format."""

    program: str
    before: DiffSide
    after: DiffSide
    linears: tuple[Linear, ...]
    stacks: tuple[Stack, ...]
    totals: Totals
    cells: Mapping[tuple[Address, Layer], tuple[int, int | None]] = field(default_factory=dict, repr=False)
    """The cell of the heat map for each layer of each site: the number of its linear, and the layer."""
    scans: Mapping[Address, tuple[Address, ...]] = field(default_factory=dict, repr=False)
    """The scans over layers around each site, the outermost first."""
    phase: str = "always"
    target: str = "gb200"
    devices: int = 1
    backends: tuple[str, ...] = ()
    """The backends that run products natively after the change."""
    other_backend: tuple[str, float] | None = None
    """Another backend, and the speed-up with it; None if it is the same."""
    batch: tuple[int, int] | None = None
    """The number of sequences per step and their length, if they are known."""
    matched: MatchedLoss
    overlays: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Messages about rules for which `policyc apply` refuses a policy."""
    notes: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    """Folders that file paths are shown relative to."""

    @property
    def differs(self) -> bool:
        """Whether the numerics of a product or any equation changed."""
        is_changed = (match.reason is not None for match in self.matched.all_matches())
        return self.totals.changed > 0 or any(is_changed)

    def short_path(self, path: str) -> str:
        """A path, or a place in a file, without the folders of this machine."""
        return shorten_path(path, self.roots)

    @property
    def time_change(self) -> float:
        """The change of the predicted step time, as a fraction of the time before, for a fixed share of other time."""
        return self.after.seconds / self.before.seconds - 1


_PATH_IN_WORD = re.compile(rf"(?<![^=]){re.escape(os.sep)}[^=]*$")


def shorten_path(path: str, roots: Sequence[str]) -> str:
    """Makes an absolute path relative to the innermost root that contains it. Outside all roots, only its name is left.

    A relative path stays as it is. In a word such as `--data=/home/me/data`, only the path is shortened.
    """

    def shorten(match: re.Match[str]) -> str:
        inside = [path for root in roots if (path := match[0].removeprefix(f"{root}{os.sep}")) != match[0]]
        return min(inside, key=len, default=os.path.basename(match[0].rstrip(os.sep)))

    return _PATH_IN_WORD.sub(shorten, path)


_DOT_OUTSIDE_PARENTHESES = re.compile(r"\.(?![^(]*\))")


def short_name(diff: DiffData, linear: int) -> str:
    """The shortest end of a linear's name that no other linear of its stack has."""
    stack = diff.linears[linear].stack
    names = [name_parts(other.name) for other in diff.linears if other.stack == stack]
    parts = name_parts(diff.linears[linear].name)
    for count in range(1, len(parts)):
        if sum(other[-count:] == parts[-count:] for other in names) == 1:
            return ".".join(parts[-count:])
    return ".".join(parts)


def name_parts(name: str) -> tuple[str, ...]:
    """The parts of a dotted name. `(train.py:8)` is one part, and so is `up (2)`."""
    return tuple(_DOT_OUTSIDE_PARENTHESES.split(name))
