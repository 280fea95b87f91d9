"""The lint rules that see a program: each has a page, and finds its fault in a model that has it."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.plan import Plan, make_plan
from policyc.language.diagnostics import Diagnostic
from policyc.language.loader import parse_with_diagnostics
from policyc.lint.engine import lint
from policyc.lint.rules import LINT_RULES, PROGRAM_CODES, load_program_rules, program
from policyc.numerics.targets import get_target
from tests.support.command import policyc as run_policyc


def array(*shape, dtype="float32"):
    """Arguments have shapes only: a plan computes nothing."""
    return jax.ShapeDtypeStruct(shape, dtype)


@jax.custom_vjp
def cross_entropy(w, h):
    return jnp.sum(h @ w)


cross_entropy.defvjp(lambda w, h: (cross_entropy(w, h), (w, h)), lambda r, g: (g * r[0], g * r[1]))


def model(p, x):
    """One-hot embedding, a scanned stack, a narrow layer, a vmapped stack, a head, and a GEMM inside a custom_vjp."""
    tokens = jnp.argmax(x, -1)
    h = jax.nn.one_hot(tokens, 256) @ p["table"]

    def body(h, layer):
        return h + jnp.tanh(h @ layer["mlp"]["up"]) @ layer["mlp"]["down"], None

    h, _ = jax.lax.scan(body, h, p["layers"])
    narrow = jnp.tanh(h @ p["narrow"]) @ p["narrow"].T
    h = h + jnp.sum(jax.vmap(jnp.dot)(jnp.broadcast_to(h, (3, *h.shape)), p["stages"]), 0)
    return jnp.sum((h + narrow) @ p["lm_head"]) + cross_entropy(p["loss"], h)


PARAMS = {
    "table": array(256, 256),
    "layers": {"mlp": {"up": array(6, 256, 256), "down": array(6, 256, 256)}},
    "narrow": array(256, 40),
    "stages": array(3, 256, 256),
    "lm_head": array(256, 256),
    "loss": array(256, 256),
}

FAULTY_POLICIES = {
    "unmatched-rule": "mpl -> fp8",
    "overridden-rule": "up -> fp8; mlp where k > 100 -> mxfp8",
    "expect-violated": "mlp -> fp8 expect 97",
    "opaque-site": "loss -> fp8",
    "opaque-index": "stages[-1] -> fp8",
    "quantized-embedding": "table -> fp8",
    "quantized-head": "lm_head -> fp8",
    "padded-gemm": "narrow -> mxfp8",
    "slower-than-bf16": "narrow -> fp8",
    "hadamard-does-not-fit": "mlp -> nvfp4(rht=wgrad, rht_size=128, sr=grad)",
    "split-scan": "layers[-2:].mlp -> fp8",
    "shredded-scan": "layers[::2] -> fp8",
    "transformer-engine-shape": "mlp -> nvfp4(rht=wgrad, sr=grad)",
}

ALL_BUT_SPEED = PROGRAM_CODES - {"slower-than-bf16"}
"""Every GEMM of these small models is slower when it is quantized."""


@cache
def model_plan() -> Plan:
    """The plan of an empty policy for `model`, which is traced once for all tests."""
    return policyc.plan(policyc.parse(""), model, PARAMS, array(130, 256))


def lint_model(text: str, codes: Collection[str] = PROGRAM_CODES) -> tuple[Diagnostic, ...]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    return lint(loaded, codes, make_plan(loaded.policy, model_plan().sites)).diagnostics


def lint_loss(text: str, loss, *arguments) -> tuple[Diagnostic, ...]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    return lint(loaded, ALL_BUT_SPEED, policyc.plan(loaded.policy, loss, *arguments)).diagnostics


@pytest.mark.parametrize("code", FAULTY_POLICIES)
def test_a_rule_finds_its_fault(code):
    assert code in {d.code for d in lint_model(FAULTY_POLICIES[code])}


def test_a_good_policy_has_no_findings_but_a_note():
    (note,) = lint_model("mlp -> fp8 expect 12; layers[-2:].mlp -> keep", ALL_BUT_SPEED)
    assert note.severity == "note"
    assert note.message == "the stack of 'layers.mlp.up' becomes 2 scans: layers 0-3, 4-5"


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_recognized_by_more_than_its_name(tied):
    def loss(p, tokens):
        h = p["words"][tokens] @ p["mix"]
        logits = h @ (p["words"].T if tied else p["out"])
        return jax.nn.logsumexp(logits, -1).sum()

    params = {"words": array(512, 256), "mix": array(256, 256), "out": array(256, 512)}
    tokens = array(256, dtype="int32")
    diagnostics = lint_loss("* -> fp8", loss, params, tokens)
    assert [d.code for d in diagnostics] == ["quantized-head"]
    assert f"'{'words' if tied else 'out'}'" in diagnostics[0].message
    assert not lint_loss("mix -> fp8", loss, params, tokens)


def test_the_shapes_of_transformer_engine_matter_only_in_4_bits():
    def loss(p, x):
        return (jnp.tanh(x @ p["w"]) @ p["w"]).sum()

    def obstacles(policy, dtype, rows):
        diagnostics = lint_loss(
            policy, loss, {"w": array(256, 256, dtype=dtype)}, array(rows, 256, dtype=dtype)
        )
        return [d.message.partition(": ")[2] for d in diagnostics if d.code == "transformer-engine-shape"]

    assert obstacles("w -> nvfp4(rht=wgrad)", "bfloat16", 256) == []
    (rotated,) = obstacles("w -> nvfp4(rht=wgrad)", "float32", 256)
    assert rotated == "Transformer Engine rotates only bfloat16, but this operand is float32"
    assert obstacles("w -> nvfp4", "float32", 256) == []
    (uneven,) = obstacles("w -> nvfp4", "bfloat16", 144)
    assert uneven == "Transformer Engine requires contracted % 32 == 0, but wgrad has 144"
    assert obstacles("w -> mxfp8", "bfloat16", 144) == []


def test_which_sites_are_slower_depends_on_the_target():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["large"]) @ w["large"].T) + jnp.sum(x @ w["narrow"])

    params = {"large": array(8192, 8192, dtype="bfloat16"), "narrow": array(8192, 64, dtype="bfloat16")}
    loaded = parse_with_diagnostics("* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    plan = policyc.plan(loaded.policy, loss, params, array(16384, 8192, dtype="bfloat16"))

    def findings(target: str) -> list[str]:
        return [str(d) for d in lint(loaded, {"slower-than-bf16"}, plan, get_target(target)).diagnostics]

    (native,), (emulated,) = findings("b200"), findings("h200")
    assert "'narrow'" in native
    assert "more" not in native
    assert "where n <= 64 -> bf16" in native
    assert ", and 1 more" in emulated
    assert "h200 has no native nvfp4" in emulated


def test_a_target_requires_a_program():
    assert "did you mean 'h200'" in run_policyc("lint", "fp8", "--against", "train.py", "--target", "h20").err
    assert "--target requires --against" in run_policyc("lint", "fp8", "--target", "h200").err


def test_every_rule_has_a_page_and_a_test():
    rules = load_program_rules()
    compiler_codes = {"schedule-without-step", "not-native", "missing-library"}
    assert set(rules) == PROGRAM_CODES == FAULTY_POLICIES.keys() | compiler_codes
    assert not PROGRAM_CODES & LINT_RULES.keys()
    for rule in rules.values():
        assert re.fullmatch(r"[A-Z].*\.", rule.title)
        for kind in ("Bad", "Good"):
            assert f"## {kind}\n\n```policy\n" in rule.page


def test_a_module_is_named_after_its_code():
    """The codes are known from the file names, without importing JAX."""
    for module in iter_modules(program.__path__):
        (rule,) = import_module(f"{program.__name__}.{module.name}").RULES
        assert rule.code == module.name.replace("_", "-")
        assert rule.check is not None


def test_without_a_program_these_rules_do_not_run():
    loaded = parse_with_diagnostics("mpl -> fp8  # allow: unmatched-rule -- another model\n")
    assert not lint(loaded, PROGRAM_CODES).diagnostics
    assert not [d for d in lint(loaded).diagnostics if "suppression" in d.code]
