"""A rule for a layer decides about exactly the GEMMs that read it, or is refused: compared with a run of the loss."""

from __future__ import annotations

import itertools
import re

import jax
import pytest
from jax.tree_util import DictKey

from policyc.compiler.analysis import analyze
from policyc.compiler.pipeline import LossCall
from policyc.compiler.plan import Plan, make_plan
from policyc.compiler.plan_checks import check_plan
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import parse
from tests.support.stack_oracle import Execution, Slice, read_slices
from tests.support.stacks import PROGRAMS, Program, X


def selectors(program: Program) -> dict[str, Slice]:
    """A selector for each layer of each parameter, and the slice of an input that it means."""
    found: dict[str, Slice] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(program.params)
    for number, (keys, leaf) in enumerate(leaves):
        names = [str(k.key) if isinstance(k, DictKey) else k.idx for k in keys]
        text = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, names)))
        axes = program.axes.get(str(names[-1]), (0,) if len(leaf.shape) > 2 else ())
        if not axes:
            found[text] = (number, ())
            continue
        for index in itertools.product(*(range(leaf.shape[axis]) for axis in axes)):
            parts = text.split(".")
            for place, i in enumerate(index, -1 if program.index_last else 0):
                parts[place] += f"[{i}]"
            found[".".join(parts)] = (number, tuple(zip(axes, index, strict=True)))
    return found


def decided(plan: Plan, executions: set[Execution]) -> set[Execution]:
    """The executions of GEMMs that a plan changes."""
    sites = {site.address: site for site in plan.sites}
    chosen = set()
    for execution in (e for e in executions if e.address in sites):
        site, iterations = sites[execution.address], dict(execution.iterations)
        layer = tuple(0 if s.is_shard_map else iterations[s.address] for s in site.stacks)
        if plan.decisions()[site.address, layer].recipe is not None:
            chosen.add(execution)
    return chosen


def compare(plan: Plan, chosen: set[Execution], right: set[Execution]) -> str:
    """Whether a plan changes the right GEMMs. One whose layer is not known has the names of all that it may read."""
    sites = {site.address: site for site in plan.sites}
    unknown = {e for e in chosen if all(t.unknown_index for t in sites[e.address].parameters)}
    return "exact" if (right and chosen - unknown <= right <= chosen) or chosen == right else "wrong"


def classify(program: Program) -> dict[str, str]:
    """What a rule for each layer of each parameter does, and one for each parameter: exact, refused, ..."""
    call = LossCall(fn=program.loss, args=(program.params, X), kwargs={}, param_argnums=(0,)).trace()
    sites = analyze(call.jaxpr, call.paths, call.frozen)
    slices = selectors(program)
    reads = read_slices(call.jaxpr, slices.values())
    chosen = {selector: {place} for selector, place in slices.items()}
    for selector, place in slices.items():
        chosen.setdefault(re.sub(r"\[\d+\]", "", selector), set()).add(place)
    verdicts = {}
    for selector, places in chosen.items():
        right = {e for e, read in reads.items() if read & places}
        plan = make_plan(parse(f"{selector} -> fp8"), sites)
        try:
            check_plan(plan)
        except PolicyError as error:
            codes = {d.code for d in error.diagnostics}
            verdicts[selector] = "refused" if codes - {"unmatched-rule"} else "lost" if right else "exact"
        else:
            verdicts[selector] = compare(plan, decided(plan, set(reads)), right)
    return verdicts


NOT_FOLLOWED = (
    "take along axis",  # single elements, taken by constants that may as well be the tokens of a batch
    "refs of weights",  # anything may be written to a reference
)
"""Programs whose weights are taken for activations. Rules for them match nothing, which is an error."""

REFUSED = frozenset({
    "rows of two layers in one matrix",
    "argsort of a table",
    "one hot selection",
    "masked sum selection",
    "repeat by counts",
    "insert a copy",
    "set one from another",
    "swap by update slice",
    "random permutation",
    "order by the data",
    "index from a while",
    "index from a scan",
    "index from stacked results",
    "index from a cond",
    "vmapped index in a scan",
    "stages on devices",
    "layers by device number",
    "shards over two axes",
    "ring of weights",
    "summed over devices",
    "same place on every device",
    "stacks divided along different axes",
    "gathered over one of two axes",
    "device order reversed",
    "gathered untiled",
    "gathered over both axes in turn",
    "gathered in the wrong order",
    "gathered over the axis that does not divide",
    "layers gathered as columns",
    "layers gathered as rows",
    "layers stacked over devices",
    "fused projections",
    "padded between",
    "vmap over layers",
    "vmap over pairs of layers",
    "scan over vmapped pairs",
    "ensemble of scans",
    "vmap over indices",
    "pipeline by rolls",
    "einsum over layers",
    "one layer replaced by set",
    "counter of floats",
    "while with a static count",
    "rotating carry",
    "prefetched weights",
    "associative scan of weights",
    "prefetched weights that start with zeros",
    "buffer that is filled",
    "two buffers in turn",
    "index by floor of floats",
    "carry of both names swapped",
    "result of a while as weight",
    "last carry of a scan over layers",
    "difference of neighbours",
    "average of all layers",
    "cumulative weights",
    "sorted over layers",
    "moving average in a carry",
    "merged adapter of the next layer",
    "block diagonal of two layers",
    "segment sum of layers",
    "reshaped across layers",
    "two layers in one product",
})  # fmt: skip
"""Programs in which rules for some layers are refused: policyc does not follow them, or one GEMM reads many layers."""


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_FOLLOWED])
def test_a_rule_for_a_layer_decides_about_the_gemms_that_read_it(name):
    verdicts = classify(PROGRAMS[name])
    assert set(verdicts.values()) <= {"exact", "refused"}, verdicts
    assert ("refused" in verdicts.values()) == (name in REFUSED), verdicts


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_rule_for_a_weight_that_is_not_followed_matches_nothing(name):
    verdicts = classify(PROGRAMS[name])
    assert "lost" in verdicts.values()
    assert set(verdicts.values()) <= {"lost", "exact"}  # exact: nothing reads the layer


def test_the_oracle_finds_the_layer_of_each_iteration():
    program = PROGRAMS["take by a permutation"]
    jaxpr = LossCall(fn=program.loss, args=(program.params, X), kwargs={}, param_argnums=(0,)).trace().jaxpr
    reads = read_slices(jaxpr, selectors(program).values())
    found = {(e.iterations[0][1], place) for e, read in reads.items() for place in read}
    order = [2, 0, 3, 1]
    assert found == {(i, (number, ((0, order[i]),))) for i in range(4) for number in (0, 1)}
