"""The lint rules that see a program: each has a page, and finds its fault in a model that has it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.language.loader import parse_with_diagnostics
from policyc.lint.engine import lint
from policyc.lint.rules import LINT_RULES, PROGRAM_CODES, load_program_rules
from policyc.numerics.targets import get_target
from tests.support.command import policyc as command

W = jnp.ones((256, 256))
X = jnp.ones((130, 256))


@jax.custom_vjp
def cross_entropy(w, h):
    return jnp.sum(h @ w)


cross_entropy.defvjp(lambda w, h: (cross_entropy(w, h), (w, h)), lambda r, g: (g * r[0], g * r[1]))


def model(p, x):
    tokens = jnp.argmax(x, -1)
    h = jax.nn.one_hot(tokens, 256) @ p["table"]

    def body(h, layer):
        return h + jnp.tanh(h @ layer["mlp"]["up"]) @ layer["mlp"]["down"], None

    h, _ = jax.lax.scan(body, h, p["layers"])
    small = jnp.tanh(h @ p["narrow"]) @ p["narrow"].T
    return jnp.sum((h + small) @ p["lm_head"]) + cross_entropy(p["loss"], h)


stack = jnp.stack([W] * 6)
PARAMS = {
    "table": W, "layers": {"mlp": {"up": stack, "down": stack}}, "narrow": jnp.ones((256, 40)), "lm_head": W, "loss": W,
}  # fmt: skip

FAULTY = {
    "unmatched-rule": "mpl -> fp8",
    "overridden-rule": "up -> fp8; mlp where k > 100 -> mxfp8",
    "expect-violated": "mlp -> fp8 expect 97",
    "opaque-site": "loss -> fp8",
    "quantized-embedding": "table -> fp8",
    "quantized-head": "lm_head -> fp8",
    "padded-gemm": "narrow -> mxfp8",
    "slower-than-bf16": "narrow -> fp8",
    "hadamard-does-not-fit": "mlp -> nvfp4(rht=wgrad, rht_size=128, sr=grad)",
    "split-scan": "layers[-2:].mlp -> fp8",
    "shredded-scan": "layers[::2] -> fp8",
    "transformer-engine-shape": "mlp -> nvfp4(rht=wgrad, sr=grad)",
}


def findings(text: str, loss=model, params=PARAMS, x=X):
    """All but speed: no GEMM of so small models gains."""
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    plan = policyc.plan(loaded.policy, loss, params, x)
    return lint(loaded, PROGRAM_CODES - {"slower-than-bf16"}, plan).diagnostics


def found(text: str) -> set[str]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    plan = policyc.plan(loaded.policy, model, PARAMS, X)
    return {d.code for d in lint(loaded, PROGRAM_CODES, plan).diagnostics}


@pytest.mark.parametrize("code", FAULTY)
def test_a_rule_finds_its_fault(code):
    assert code in found(FAULTY[code])


def test_a_careful_policy_is_clean():
    (note,) = findings("mlp -> fp8 expect 12; layers[-2:].mlp -> keep")
    assert note.severity == "note"
    assert note.message == "the stack of 'layers.mlp.up' becomes 2 scans: layers 0-3, 4-5"


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_known_by_more_than_its_name(tied):
    def loss(p, tokens):
        h = p["words"][tokens] @ p["mix"]
        logits = h @ (p["words"].T if tied else p["out"])
        return jax.nn.logsumexp(logits, -1).sum()

    params = {"words": jnp.ones((512, 256)), "mix": W, "out": jnp.ones((256, 512))}
    tokens = jnp.zeros(256, jnp.int32)
    told = findings("* -> fp8", loss, params, tokens)
    assert [d.code for d in told] == ["quantized-head"]
    assert f"'{'words' if tied else 'out'}'" in told[0].message
    assert not findings("mix -> fp8", loss, params, tokens)


def test_shapes_of_transformer_engine_matter_to_4_bits_only():
    def loss(p, x):
        return (jnp.tanh(x @ p["w"]) @ p["w"]).sum()

    def said(policy, dtype, rows):
        told = findings(policy, loss, {"w": W.astype(dtype)}, jnp.ones((rows, 256), dtype))
        return [d.message.partition(": ")[2] for d in told if d.code == "transformer-engine-shape"]

    assert said("w -> nvfp4(rht=wgrad)", jnp.bfloat16, 256) == []
    (rotated,) = said("w -> nvfp4(rht=wgrad)", jnp.float32, 256)
    assert rotated == "Transformer Engine rotates bfloat16, and this operand is float32"
    assert said("w -> nvfp4", jnp.float32, 256) == []
    (uneven,) = said("w -> nvfp4", jnp.bfloat16, 144)
    assert uneven == "Transformer Engine wants contracted % 32 == 0, and wgrad has 144"
    assert said("w -> mxfp8", jnp.bfloat16, 144) == []


def test_what_is_slower_depends_on_the_target():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["large"]) @ w["large"].T) + jnp.sum(x @ w["narrow"])

    shapes = {
        "large": jax.ShapeDtypeStruct((8192, 8192), "bfloat16"),
        "narrow": jax.ShapeDtypeStruct((8192, 64), "bfloat16"),
    }
    loaded = parse_with_diagnostics("* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    plan = policyc.plan(loaded.policy, loss, shapes, jax.ShapeDtypeStruct((16384, 8192), "bfloat16"))

    def said(name: str) -> list[str]:
        return [str(d) for d in lint(loaded, {"slower-than-bf16"}, plan, get_target(name)).diagnostics]

    (native,), (emulated,) = said("b200"), said("h200")
    assert "'narrow'" in native
    assert "more" not in native
    assert "where n <= 64 -> bf16" in native
    assert ", and 1 more" in emulated
    assert "h200 has no native nvfp4" in emulated


def test_a_target_goes_with_a_program():
    assert "did you mean 'h200'" in command("lint", "fp8", "--against", "train.py", "--target", "h20").err
    assert "--target requires --against" in command("lint", "fp8", "--target", "h200").err


def test_every_rule_has_a_page_and_a_test():
    rules = load_program_rules()
    assert (
        set(rules)
        == PROGRAM_CODES
        == FAULTY.keys() | {"schedule-without-step", "not-native", "missing-library"}
    )
    assert not PROGRAM_CODES & LINT_RULES.keys()
    for rule in rules.values():
        assert re.fullmatch(r"[A-Z].*\.", rule.title)
        for kind in ("Bad", "Good"):
            assert f"## {kind}\n\n```policy\n" in rule.page


def test_without_a_program_nothing_is_asked_of_it():
    loaded = parse_with_diagnostics("mpl -> fp8  # allow: unmatched-rule -- another model\n")
    assert not lint(loaded, PROGRAM_CODES).diagnostics
    assert not [d for d in lint(loaded).diagnostics if "suppression" in d.code]
