"""A rule for a layer decides about exactly the GEMMs that read it, or is refused: compared with a run of the loss."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.tree_util import DictKey

from policyc.compiler.pipeline import LossCall, find_sites
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import parse
from tests.support.stack_oracle import Execution, Slice, read_slices
from tests.support.stacks import PROGRAMS, Program, X
from tests.support.stacks.base import STACK, scan, take, w
from tests.support.stacks.combinations import combine, cover


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
    decisions = plan.decisions()
    chosen = set()
    for execution in (e for e in executions if e.address in sites):
        site, iterations = sites[execution.address], dict(execution.iterations)
        layer = tuple(0 if s.is_shard_map else iterations[s.address] for s in site.stacks)
        if decisions[site.address, layer].recipe is not None:
            chosen.add(execution)
    return chosen


def classify(program: Program) -> tuple[set[str], str]:
    """What rules do for each layer of each parameter, and for each parameter: exact, refused, ...; and why refused."""
    call = LossCall(fn=program.loss, args=(program.params, X), kwargs={}, param_argnums=(0,)).trace()
    sites = find_sites(call)
    slices = selectors(program)
    reads = read_slices(call.jaxpr, slices.values())
    chosen = {selector: {place} for selector, place in slices.items()}
    for selector, place in slices.items():
        chosen.setdefault(re.sub(r"\[\d+\]", "", selector), set()).add(place)
    verdicts, messages = set(), []
    for selector, places in chosen.items():
        right = {e for e, read in reads.items() if read & places}
        plan = make_plan(parse(f"{selector} -> fp8"), sites)
        try:
            check_plan(plan)
        except PolicyError as error:
            codes = {d.code for d in error.diagnostics}
            verdicts.add("refused" if codes - {"unmatched-rule"} else "lost" if right else "exact")
            messages += [d.message for d in error.diagnostics]
        else:
            verdicts.add("exact" if decided(plan, set(reads)) == right else "wrong")
    return verdicts, "\n".join(messages)


_NOT_EVALUATED = "its index is computed from constants by operations that policyc does not evaluate"
_GATHERED = "devices gather it in a form that policyc does not follow"
_CARRIED = "the loop around it carries it, and changes it in every iteration"
_FILLED = "a loop carries it, and fills it one layer at a time"
_SEVERAL = "one product reads several of the 4 members of axis 0 at once"
REFUSED = {
    "reference that a loop fills": "it is read from a reference, and policyc does not follow writes to references",
    "permuted rows in a carry": _CARRIED,
    "inverse": "it is inside 'custom_linear_solve', which the compiler does not know",
    "one hot selection": "one product reads all 4 members of axis 0 at once",
    "repeat by counts": "its index is computed by 'scatter', which policyc does not evaluate",
    "order by the data": "its index is computed from values that are not known before the program runs",
    "index by a float": "its index is computed in float32, but policyc evaluates only integers",
    "index from a cond": "its index is the result of a 'cond', which policyc does not evaluate",
    "weights that devices pass on": "devices send it to each other",
    "layers by device number": _NOT_EVALUATED,
    "shards over two axes": "divided over 4 devices, which all run the same program (shard_map): "
    "an index cannot tell them apart",
    "gathered in the wrong order": _GATHERED,
    "gathered over the axis that does not divide": "only a part of the gathered array is read",
    "layers gathered as columns": _GATHERED,
    "fused projections": "it is in a stack inside a stack, and the index could be that of either one, "
    "or count all layers",
    "padded between": "it is padded between its elements",
    "associative scan of weights": _SEVERAL,
    "prefetched weights that start with zeros": _FILLED,
    "buffer that is filled": _FILLED,
    "moving average in a carry": _FILLED,
    "reshaped across layers": "it is reshaped across the boundaries of layers",
    "two layers in one product": "each iteration of a loop reads a different part of axis 0, of size 4",
}
"""Programs in which rules for some layers are refused, and why: policyc does not follow them, or one GEMM reads many
layers."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rule_for_a_layer_decides_about_the_gemms_that_read_it(name):
    check_rules(PROGRAMS[name], REFUSED.get(name, ""))


@pytest.mark.any_jax
@pytest.mark.parametrize(("program", "reason"), [pytest.param(*pair, id=name) for name, *pair in cover()])
def test_a_rule_for_a_layer_decides_whatever_the_parts_of_a_program_are(program, reason):
    check_rules(program, reason)


def check_rules(program: Program, reason: str) -> None:
    """No rule decides about other GEMMs. Some are refused if there is a reason, and say so."""
    verdicts, messages = classify(program)
    assert verdicts <= {"exact", "refused"}, messages
    assert ("refused" in verdicts) == bool(reason), messages
    assert reason in messages


@pytest.mark.any_jax
@pytest.mark.parametrize("seed", range(4))  # seeds 0 to 399 were tried: 0 wrong, 0 lost
def test_a_rule_for_a_layer_of_a_random_program_decides_about_the_gemms_that_read_it(seed):
    name, program = combine(seed)
    verdicts, messages = classify(program)
    assert verdicts <= {"exact", "refused"}, (name, messages)


def test_a_rule_that_names_one_of_the_weights_that_a_gemm_may_read_is_refused():
    def loss(p, x):
        def body(carry, _):
            h, a, b = carry
            return (h @ a, b, a), None

        return lax.scan(body, (x, p["a"], p["b"]), length=2)[0][0].sum()

    params = {"a": w(), "b": w()}
    call = LossCall(fn=loss, args=(params, X), kwargs={}, param_argnums=(0,)).trace()
    sites = find_sites(call)
    with pytest.raises(
        PolicyError, match="its weight is one of 'a', 'b', or several of them: the loop around it"
    ):
        check_plan(make_plan(parse("b -> fp8"), sites))
    check_plan(make_plan(parse("a, b -> fp8"), sites))
    check_plan(make_plan(parse("* -> fp8"), sites))


def test_the_oracle_finds_the_layer_of_each_iteration():
    program = Program(STACK, lambda p, x: scan(take(p["layers"], np.array([2, 0, 3, 1])), x).sum(), {})
    jaxpr = LossCall(fn=program.loss, args=(program.params, X), kwargs={}, param_argnums=(0,)).trace().jaxpr
    reads = read_slices(jaxpr, selectors(program).values())
    found = {(e.iterations[0][1], place) for e, read in reads.items() for place in read}
    order = [2, 0, 3, 1]
    assert found == {(i, (number, ((0, order[i]),))) for i in range(4) for number in (0, 1)}
