"""What is wrong with a plan, as diagnostics: code, message, span and help. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.compiler.planning import plan_checks
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity
from policyc.language.loader import parse
from policyc.numerics.backends.choice import Machine
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import X, plan_model


def diagnostics_of(plan: Plan, **options: Any) -> list[Diagnostic]:
    """What `check_plan` raises."""
    with pytest.raises(PolicyError) as caught:
        check_plan(plan, **options)
    return list(caught.value.diagnostics)


def spanned(diagnostic: Diagnostic) -> str:
    """The text that a diagnostic is about."""
    span = diagnostic.span
    assert span is not None
    return span.source.text[span.start : span.end]


# ---- expectations


def test_all_faults_are_raised_together() -> None:
    plan = plan_model("layers.up -> mxfp8 expect 3; head -> fp8 expect 2; * -> nvfp4", require_native=True)
    codes = [d.code for d in diagnostics_of(plan)]
    assert codes.count("expect-violated") == 2
    assert "not-native" in codes


# ---- opaque sites


def opaque_loss(p: Any, x: Any) -> Any:
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    return product(product(x @ p["body"], p["own"]), p["own"])


OPAQUE = find_sites(opaque_loss, {"body": struct(16, 16), "own": struct(16, 16)}, X)


def test_a_rule_that_changes_what_cannot_be_reached() -> None:
    (diagnostic,) = diagnostics_of(make_plan(parse("body -> fp8; * -> nvfp4"), OPAQUE))
    assert diagnostic.code == "opaque-site"
    assert diagnostic.severity is Severity.ERROR
    assert diagnostic.message.startswith("the site 'own' (")
    assert "test_plan_checks.py:" in diagnostic.message
    assert diagnostic.message.endswith("a function with its own backward rule (jax.custom_vjp), and 1 more")
    assert spanned(diagnostic) == "* -> nvfp4"
    assert diagnostic.help == "add a rule after it: own -> keep"


def test_a_rule_is_not_said_to_have_no_other_sites_if_they_have_the_same_name() -> None:
    def loss(p: Any, x: Any) -> Any:
        product = jax.custom_vjp(lambda x, w: x @ w)
        product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
        return product(x @ p["own"], p["own"])

    (diagnostic,) = diagnostics_of(make_plan(parse("* -> fp8"), find_sites(loss, {"own": struct(16, 16)}, X)))
    assert diagnostic.help == "write '-> keep' in this rule: its other sites have the same names"


@pytest.mark.parametrize("policy", ["* -> nvfp4; own -> keep", "body -> fp8", "* -> keep"])
def test_an_opaque_site_that_is_kept_is_no_fault(policy: str) -> None:
    check_plan(make_plan(parse(policy), OPAQUE))


def test_the_selector_for_an_opaque_site_without_a_name() -> None:
    def loss(p: Any, x: Any) -> Any:
        product = jax.custom_vjp(lambda x: x @ x.T)
        product.defvjp(lambda x: (x @ x.T, x), lambda kept, g: (kept,))
        return product(x * p["scale"])

    plan = make_plan(parse("* -> fp8"), find_sites(loss, {"scale": struct(16)}, X))
    (diagnostic,) = diagnostics_of(plan)
    assert diagnostic.help == "write '-> keep' in this rule: it decides about no other site"
    assert plan_checks.write_rules(plan.sites, "keep") == "* where k == 16 and n == 8 -> keep"


# ---- layers on several devices


def shared_out(p: Any, x: Any) -> Any:
    """Four devices with two layers each."""
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(layers: Any, x: Any) -> Any:
        h = lax.pcast(x, "stage", to="varying")
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]

    return jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))(p["layers"], x)


SHARED_OUT = find_sites(shared_out, {"layers": struct(8, 16, 16)}, X)


def test_devices_cannot_treat_their_layers_differently() -> None:
    plan = make_plan(parse("layers -> fp8; layers[-1:] -> keep; layers[0] -> bf16"), SHARED_OUT)
    first, second = diagnostics_of(plan)
    assert (first.code, second.code) == ("opaque-site", "opaque-site")
    assert "'layers' are divided over 4 devices" in first.message
    assert (spanned(first), spanned(second)) == ("layers[-1:] -> keep", "layers[0] -> bf16")


@pytest.mark.parametrize("policy", ["layers -> fp8", "layers -> fp8; layers[1::2] -> keep"])
def test_layers_at_the_same_place_on_every_device_may_be_chosen(policy: str) -> None:
    check_plan(make_plan(parse(policy), SHARED_OUT))


# ---- recipes and machines


def test_a_recipe_that_contradicts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_checks, "find_recipe_problems", lambda recipe: ["two options contradict"])
    (diagnostic,) = diagnostics_of(plan_model("head -> nvfp4(rht=wgrad)"))
    assert (diagnostic.code, diagnostic.message) == ("contradictory-options", "two options contradict")
    assert spanned(diagnostic) == "nvfp4(rht=wgrad)"


def test_emulation_is_a_fault_where_native_products_are_required() -> None:
    plan = plan_model("layers -> fp8; head -> nvfp4", target="h100", require_native=True)
    (decision,) = [run.decision for run in plan.runs() if run.site.name == "head"]
    obstacle = decision.lowerings[0].obstacle
    assert obstacle is not None
    diagnostics = [d for d in diagnostics_of(plan) if spanned(d) == "head -> nvfp4"]
    assert [(d.code, d.message, d.help) for d in diagnostics] == [
        ("not-native", f"fprop of 'head' would be emulated, and 2 more: {obstacle.reason}", obstacle.remedy)
    ]
    check_plan(plan_model("layers -> fp8; head -> nvfp4", target="h100"))


def test_a_backend_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_missing_library(self) -> str:
            return "install the library"

    plan = plan_model("* -> fp8; head -> mxfp8", backend="emulate")
    plan.decisions()
    monkeypatch.setattr(plan_checks.backends, "load", lambda name: Missing())
    (diagnostic,) = diagnostics_of(plan)
    assert (diagnostic.code, diagnostic.message) == ("missing-library", "install the library")
    assert spanned(diagnostic) == "* -> fp8", "the first rule that needs it"
    another_gpu = plan_model("* -> fp8", backend="emulate", target="gb200")
    monkeypatch.undo()
    another_gpu.decisions()
    monkeypatch.setattr(plan_checks.backends, "load", lambda name: Missing())
    check_plan(another_gpu)


def test_a_machine_has_a_name() -> None:
    """Plans for the devices here are plans for the first of them."""
    assert plan_model("* -> fp8").machine == Machine(jax.devices()[0].platform)
