"""The lint rules that see a program: each has a page, and finds its fault in a model that has it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.hardware.collectives import CollectiveTotal
from policyc.language.diagnostics import Diagnostic, plain, render
from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded
from policyc.linter.output import format_json
from policyc.linter.rules import ALL_CODES, ALL_RULES
from policyc.linter.rules.program import transformer_engine
from policyc.numerics.targets import get_target
from tests.support.linting import follow_help

pytestmark = pytest.mark.any_jax


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
        hidden = jnp.tanh(h @ layer["mlp"]["up"]) * (h @ layer["mlp"]["gate"])
        return h + hidden @ layer["mlp"]["down"], None

    h, _ = jax.lax.scan(body, h, p["layers"])
    narrow = jnp.tanh(jnp.dot(h, p["narrow"], precision="highest")) @ p["narrow"].T
    h = h + jnp.sum(jax.vmap(jnp.dot)(jnp.broadcast_to(h, (3, *h.shape)), p["stages"]), 0)
    return jnp.sum((h + narrow) @ p["lm_head"]) + cross_entropy(p["loss"], h)


PARAMS = {
    "table": array(256, 256),
    "layers": {"mlp": {name: array(6, 256, 256) for name in ("up", "gate", "down")}},
    "narrow": array(256, 40),
    "stages": array(3, 256, 256, dtype="bfloat16"),
    "lm_head": array(256, 256),
    "loss": array(256, 256),
}

SPEED = {"slower-than-bf16", "slower-than-fp8"}
PROGRAM_CODES = frozenset(rule.code for rule in ALL_RULES.values() if rule.needs_program)
ALL_BUT_SPEED = (PROGRAM_CODES | {"quantized-head"}) - SPEED
"""Every GEMM of these small models is slower when it is quantized."""


@cache
def model_plan() -> Plan:
    """The plan of an empty policy for `model`, which is traced once for all tests."""
    return policyc.plan(policyc.parse(""), model, PARAMS, array(130, 256))


def lint_model(text: str, codes: Collection[str] = PROGRAM_CODES) -> tuple[Diagnostic, ...]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    return lint_loaded(loaded, codes, make_plan(loaded.policy, model_plan().sites))


def lint_loss(text: str, loss, *arguments) -> tuple[Diagnostic, ...]:
    loaded = parse_with_diagnostics(text)
    assert not loaded.diagnostics
    return lint_loaded(loaded, ALL_BUT_SPEED, policyc.plan(loaded.policy, loss, *arguments))


COLLECTIVES = [
    CollectiveTotal(
        kind="all-gather", type="bf16", count=2, bytes=10**7, readers=(readers,), products=products
    )
    for readers, products in (
        ("quantizers", ("layers.mlp.up @ fprop", "layers.mlp.gate @ fprop")),
        ("GEMMs", ("layers.mlp.down @ fprop",)),
    )
]
"""The collectives of a step that gathers two weights in bf16 and then quantizes them."""
TEXTS = Path(__file__).parent / "programs"
POLICIES = sorted(path.stem for path in TEXTS.glob("*.policy"))


@pytest.mark.parametrize("name", POLICIES)
def test_findings_in_the_model(name):
    """`UPDATE_SNAPSHOTS=1` writes the texts again."""
    policy = (TEXTS / f"{name}.policy").read_text(encoding="utf-8")
    loaded = parse_with_diagnostics(policy, shown=f"{name}.policy")
    target = re.match(r"# on (\w+)", policy)
    plan = make_plan(loaded.policy, model_plan().sites)
    on = {"target": get_target(target[1])} if target else {}
    found = lint_loaded(
        loaded, {name.removesuffix("-near")}, plan, server="vllm", collectives=COLLECTIVES, **on
    )
    text = "".join(f"{render(diagnostic)}\n\n" for diagnostic in found)
    text = text.replace(f"{Path(__file__).parent}{os.sep}", "")
    text = re.sub(r"[^\s(]*test_program_rules\.py:\d+", "model.py:N", text)
    expected = TEXTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")


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


def loss_with_fp32_products(p, x):
    """Two products in bfloat16; in fp32, a router and the product of one-hot targets and log-softmax."""
    h = jnp.tanh(x @ p["up"]) @ p["down"]
    gates = jax.nn.softmax(h.astype("float32") @ p["router"])
    targets = jax.nn.one_hot(jnp.argmax(gates, -1), 16)
    with jax.named_scope("pick"):
        picked = jnp.einsum("te,te->t", targets, jax.nn.log_softmax(gates))
    return -jnp.mean(picked) + jnp.sum(h @ p["down"])


def notes_on_fp32_products(policy: str, dtype: str) -> list[Diagnostic]:
    params = {"up": array(64, 64, dtype=dtype), "down": array(64, 64, dtype=dtype), "router": array(64, 16)}
    found = lint_loss(policy, loss_with_fp32_products, params, array(32, 64, dtype=dtype))
    return [d for d in found if d.code == "lowered-fp32-product"]


@pytest.mark.parametrize(
    ("policy", "sites"),
    [
        ("* -> bf16", ["router", "pick"]),
        ("* -> fp8", ["router", "pick"]),
        ("* -> nvfp4(sr=grad)", []),  # router-in-4-bits and attention-scores-in-4-bits
        ("* where weight -> bf16", ["router"]),
        ("* -> bf16; router -> f32", ["pick"]),
        ("* -> bf16; router, pick -> keep", []),
        ("router -> bf16; up -> bf16", []),  # a rule for these alone means it
        ("* -> f32", []),
        ("* -> keep", []),
    ],
)
def test_a_rule_for_everything_is_noted_if_it_lowers_products_in_fp32(policy, sites):
    findings = notes_on_fp32_products(policy, "bfloat16")
    assert [name for d in findings for name in d.sites] == sites
    assert all(d.severity == "note" for d in findings)
    assert not notes_on_fp32_products(policy, "float32")  # there every product is in fp32


def test_most_products_may_be_in_fp32_if_the_weights_are_not():
    def loss(p, x):  # a state space layer: two projections in bfloat16, three products of its state in fp32
        h = (x @ p["in"]).astype("float32")
        with jax.named_scope("state"):
            h = jnp.tanh(h @ h.T) @ jnp.tanh(h @ h.T) @ h
        return jnp.sum(h.astype(x.dtype) @ p["out"])

    params = {"in": array(64, 64, dtype="bfloat16"), "out": array(64, 64, dtype="bfloat16")}
    found = lint_loss("* -> bf16", loss, params, array(32, 64, dtype="bfloat16"))
    (note,) = (d for d in found if d.code == "lowered-fp32-product")
    assert "computes 'state' in fp32, unlike most of its arithmetic" in note.message


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


def test_an_installed_transformer_engine_with_the_fix_has_no_zero_gradients(monkeypatch):
    code, target = "transformer-engine-zero-gradients", get_target("spark")
    loaded = parse_with_diagnostics("mlp -> nvfp4(sr=grad)")
    plan = make_plan(loaded.policy, model_plan().sites)
    for installed, count in (("2.18.0", 1), ("2.20.2", 0), ("3.0", 0)):
        monkeypatch.setattr(transformer_engine, "version", lambda _, installed=installed: installed)
        assert len(lint_loaded(loaded, {code}, plan, target)) == count


def findings_about_speed(code: str, width: int, narrow: int, tokens: int) -> dict[str, list[str]]:
    """The findings about a model with a large and a narrow GEMM, by target."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w["large"]) @ w["large"].T) + jnp.sum(x @ w["narrow"])

    params = {
        "large": array(width, width, dtype="bfloat16"),
        "narrow": array(width, narrow, dtype="bfloat16"),
    }
    loaded = parse_with_diagnostics("* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    plan = policyc.plan(loaded.policy, loss, params, array(tokens, width, dtype="bfloat16"))
    return {
        target: [str(d) for d in lint_loaded(loaded, {code}, plan, get_target(target))]
        for target in ("b200", "gb200", "h200")
    }


def test_which_sites_are_slower_depends_on_the_target():
    findings = findings_about_speed("slower-than-bf16", width=8192, narrow=64, tokens=16384)
    (native,), (emulated,) = findings["b200"], findings["h200"]
    assert "'narrow'" in native
    assert "more" not in native
    assert "add a rule after it: narrow -> bf16" in native
    assert ", and 1 more" in emulated
    assert "h200 has no native nvfp4; write '-> bf16' in this rule" in emulated


def test_four_bits_are_compared_with_fp8_on_gpus_that_have_both():
    findings = findings_about_speed("slower-than-fp8", width=16384, narrow=1024, tokens=65536)
    (narrow,) = findings["gb200"]
    assert "'narrow' (m = 65536, n = 1024, k = 16384) takes" in narrow
    assert re.search(
        r"takes 1\.\d times as long as in fp8 on gb200 with Transformer Engine \(\d\.\d with XLA\)", narrow
    )
    assert "more" not in narrow
    assert "add a rule after it: narrow -> fp8" in narrow
    assert not findings["h200"]  # emulated, which is another finding


# ---- every site, once


def lint_all(text: str) -> tuple[Diagnostic, ...]:
    """All findings about `model`, static ones too, except those about speed."""
    return lint_model(text, set(ALL_CODES) - SPEED)


def test_a_finding_names_its_sites():
    (finding,) = (d for d in lint_model("mlp, narrow -> mxfp8") if d.code == "padded-gemm")
    assert list(finding.sites) == ["layers.mlp.up", "layers.mlp.gate", "layers.mlp.down", "narrow"]
    assert json.loads(format_json([finding], plain))[0]["sites"] == list(finding.sites)


@pytest.mark.parametrize(
    ("text", "code", "absent"),
    [
        # the reason instead of its effect
        ("layers[8:4] -> fp8", "empty-slice", "unmatched-rule"),
        ("mlp where k < 0 -> fp8", "impossible-predicate", "unmatched-rule"),
        ("default -> fp8", "literal-default", "unmatched-rule"),
        ("stages[-1] -> fp8", "opaque-index", "unmatched-rule"),
        ("mlp.up -> fp8; mlp -> bf16", "shadowed-rule", "overridden-rule"),
        ("mlp -> fp8; until 0 { mlp -> bf16 }", "phase-never-holds", "overridden-rule"),
        ("mlp -> nvfp4(rht=wgrad, sr=grad)", "padded-gemm", "hadamard-does-not-fit"),
    ],
)
def test_one_fault_has_one_finding(text, code, absent):
    codes = [d.code for d in lint_all(text)]
    assert codes.count(code) == 1
    assert absent not in codes


def test_a_suppression_may_be_needed_only_without_a_program():
    text = "narrow -> nvfp4(sr=grad)  # allow: no-high-precision-tail, quantized-embedding -- without a program\n"
    assert "unused-suppression" not in {d.code for d in lint_all(text)}
    assert "unused-suppression" not in {d.code for d in lint_loaded(parse_with_diagnostics(text))}


def test_with_a_program_names_are_not_guessed():
    """`model` has no site of the common names, but an embedding ('table') and a stack ('layers')."""
    messages = {d.code: f"{d.message}: {d.help}" for d in lint_all("* -> nvfp4(sr=grad)")}
    assert "('table')" in messages["quantized-embedding"]
    assert "* where layer >= -1 -> bf16" in messages["no-high-precision-tail"]
    assert "attention-scores-in-4-bits" not in messages
    assert "router-in-4-bits" not in messages
    assert "no-high-precision-tail" not in {d.code for d in lint_all("narrow -> nvfp4(sr=grad)")}


def test_sensitive_sites_are_found_by_their_kind_and_not_by_their_names():
    def loss(p, x):
        for w in p["net"]:
            chances, experts = jax.lax.top_k(jax.nn.softmax(x @ w["head"]), 1)
            routed = jnp.einsum("td,tdf->tf", x, w["wte"][experts[:, 0]])
            x = x + chances * jnp.einsum("td,tdf->tf", jnp.tanh(routed), w["lm_head"][experts[:, 0]])
            q = x @ w["router"]
            x = x + jax.nn.softmax(q @ q.T) @ x
        return -jax.nn.log_softmax(x @ p["gate"])[:, 0].mean()

    layer = {
        "head": array(64, 4),
        "wte": array(4, 64, 64),
        "lm_head": array(4, 64, 64),
        "router": array(64, 64),
    }
    params = {"net": [layer] * 3, "gate": array(64, 99)}
    loaded = parse_with_diagnostics("* where k > 1 -> nvfp4(sr=grad)")
    plan = policyc.plan(loaded.policy, loss, params, array(64, 64))
    found = lint_loaded(loaded, {*ALL_CODES} - SPEED, plan)
    messages = {d.code: f"{d.message}: {d.help}" for d in found}
    assert "('net[0].head'), and 2 more" in messages["router-in-4-bits"]
    assert "add a rule after it: * where router -> bf16" in messages["router-in-4-bits"]
    assert "('gate')" in messages["quantized-head"]
    assert "quantized-embedding" not in messages
    assert "add a rule after it: * where layer >= -1 -> bf16" in messages["no-high-precision-tail"]
    assert "add 'and weight' to match only the projections" in messages["attention-scores-in-4-bits"]


# ---- remedies


FOLLOWED = (
    *(
        text
        for path in TEXTS.glob("*.policy")
        if "\n" not in (text := path.read_text(encoding="utf-8").strip())
    ),
    "* -> nvfp4(rht=wgrad, sr=grad)",
    "* -> mxfp4(sr=grad)",
    "* -> fp8",
    "mlp, narrow -> mxfp8",
    "mlp where k > 10 -> nvfp4(rht=wgrad, rht_size=64, sr=grad)",
    "mlp, stages, narrow @ wgrad -> mxfp8",
)


def test_following_a_remedy_removes_the_finding_and_adds_no_error():
    """A remedy may make another finding visible, such as a split, but no error and no rule without effect."""
    followed = set()
    for text in FOLLOWED:
        findings = lint_model(text, ALL_CODES)
        for finding in findings:
            remedied = follow_help(text, finding.help)
            if remedied is None:
                continue
            followed.add(finding.code)
            after = lint_model(remedied, ALL_CODES)
            hint = f"{text} -> {finding.code} -> {remedied}"
            assert finding.code not in {d.code for d in after}, hint
            new = {d.code for d in after} - {d.code for d in findings}
            assert not new & {d.code for d in after if d.severity == "error"}, hint
            assert not new & {"shadowed-rule", "overridden-rule", "redundant-rule", "unmatched-rule"}, hint
    without_text = {
        "unmatched-rule",
        "overridden-rule",
        "opaque-index",
        "split-scan",
        "weight-gradient-in-bf16",
        "transformer-engine-shape",
        "not-servable",  # of a server
        "transformer-engine-zero-gradients",  # of a target
        "serving-hardware",
        "bf16-gathered",  # of a compiled step
    }
    assert (
        followed
        >= {rule.code for rule in ALL_RULES.values() if rule.needs_program and rule.module} - without_text
    )
    assert followed >= {"quantized-embedding", "quantized-head", "no-high-precision-tail"}


def test_a_shorter_transform_is_suggested_only_if_it_fits():
    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"])

    def suggest(recipe, rows):
        (finding,) = (d for d in lint_loss(f"w -> {recipe}", loss, {"w": array(256, 256)}, array(rows, 256))
                      if d.code == "hadamard-does-not-fit")  # fmt: skip
        return finding.help

    assert suggest("nvfp4(rht=wgrad, rht_size=128, sr=grad)", 160).startswith("write rht_size=32, or ")
    assert "rht_size" not in suggest("nvfp4(rht=wgrad, rht_size=128, sr=grad)", 136)
    assert "rht_size" not in suggest("split(bwd=nvfp4(rounding=ms_eden))", 160)
    codes = {
        d.code for d in lint_loss("w -> nvfp4(rht=wgrad)", loss, {"w": array(256, 256)}, array(136, 256))
    }
    assert codes >= {"padded-gemm"}
    assert "hadamard-does-not-fit" not in codes


@pytest.mark.parametrize(
    "name", ["recipe", "contract embed -> batch", "[bold]x", "a*b", "where", "k[0]", "größe", "!"]
)
def test_suggested_rules_match_whatever_a_program_calls_its_parameters(name):
    def loss(p, x):
        return cross_entropy(p[name], x) + jnp.sum(x @ p["other"])

    sites = policyc.plan(
        policyc.parse(""), loss, {name: array(16, 16), "other": array(16, 16)}, array(8, 16)
    ).sites
    loaded = parse_with_diagnostics("* -> fp8")
    (finding,) = lint_loaded(loaded, {"opaque-site"}, make_plan(loaded.policy, sites))
    remedied = parse_with_diagnostics(follow_help("* -> fp8", finding.help) or "")
    assert not remedied.diagnostics
    assert not lint_loaded(remedied, {"opaque-site"}, make_plan(remedied.policy, sites))


def test_without_a_program_these_rules_do_not_run():
    loaded = parse_with_diagnostics("mpl -> fp8  # allow: unmatched-rule -- another model\n")
    assert not lint_loaded(loaded, PROGRAM_CODES)
    assert not [d for d in lint_loaded(loaded) if "suppression" in d.code]


# ---- weights that are fused, and their gradients


def attention(p, x):
    q, k, v = (x @ p[name].astype(x.dtype) for name in "qkv")
    y = jax.nn.softmax(q @ k.T) @ v @ p["o"].astype(x.dtype)
    gates = jax.nn.softmax(y @ p["router"].astype(x.dtype))
    return jnp.sum(gates @ p["down"].astype(x.dtype)) + jnp.sum(y @ p["up"].astype(x.dtype))


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("* -> fp8", []),
        ("* -> fp8; v -> mxfp8", [("v",)]),
        ("* -> fp8; k, v -> mxfp8", [("k", "v")]),
        ("* -> bf16; v -> keep", []),  # both are served as they are
        ("* -> fp8; o -> mxfp8", []),  # it reads another array
        ("* -> fp8; v @ bwd -> bf16", []),  # only fprop is served
        ("* -> bf16; until 50% { v -> fp8 }", [("v",)]),
    ],
)
def test_fused_layers_are_those_that_read_the_same_array(text, sites):
    params = {name: array(64, 64) for name in ("q", "k", "v", "o", "router", "down", "up")}
    found = lint_loss(text, attention, params, array(64, 64, dtype="bfloat16"))
    assert [d.sites for d in found if d.code == "fused-layers-differ"] == sites


@pytest.mark.parametrize(("dtype", "names"), [("float32", []), ("bfloat16", ["q"]), ("float16", ["q"])])
def test_a_gradient_has_the_type_of_its_parameter(dtype, names):
    params = {name: array(64, 64, dtype=dtype if name == "q" else "float32")
              for name in ("q", "k", "v", "o", "router", "down", "up")}  # fmt: skip
    found = lint_loss("* -> mxfp8", attention, params, array(64, 64, dtype="bfloat16"))
    assert [n for d in found if d.code == "weight-gradient-in-bf16" for n in d.sites] == names
    frozen = lint_loss("q @ fprop -> mxfp8", attention, params, array(64, 64, dtype="bfloat16"))
    assert "weight-gradient-in-bf16" not in {d.code for d in frozen}
