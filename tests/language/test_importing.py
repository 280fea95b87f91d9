"""Imported policies decide as the tool does: by the tools' own matching, and as the policy written by hand."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.sites.site_list import Sites
from policyc.language import selectors
from policyc.language.importing import ImportFailed, glob_selectors, import_policy, regex_selectors
from policyc.language.loader import parse
from tests.support.command import policyc
from tests.support.jaxpr_tools import find_sites, struct

pytestmark = pytest.mark.any_jax

ATTENTION = "decoder.layers.self_attention.{query,key,value,out}"
MLP = "decoder.layers.mlp.{wi_0,wi_1,wo}"
NV = "nvfp4(rht=wgrad, sr=grad, scale2d=weights)"


@pytest.fixture(scope="module")
def maxtext() -> Sites:
    """The sites of a decoder with MaxText's names, in a scan over its layers."""
    size = 32

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            a = p["self_attention"]
            q, k, v = (h @ a[name]["kernel"] for name in ("query", "key", "value"))
            h = h + jax.nn.softmax(q @ k.T) @ v @ a["out"]["kernel"]
            m = p["mlp"]
            up = jax.nn.silu(h @ m["wi_0"]["kernel"]) * (h @ m["wi_1"]["kernel"])
            return h + up @ m["wo"]["kernel"], None

        decoder = params["decoder"]
        h, _ = jax.lax.scan(layer, params["token_embedder"]["embedding"][tokens], decoder["layers"])
        logits = jax.nn.log_softmax(h @ decoder["logits_dense"]["kernel"])
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, None], 1))

    def kernel(n: int, m: int) -> Any:
        return {"kernel": struct(4, n, m)}

    layers = {
        "self_attention": {name: kernel(size, size) for name in ("query", "key", "value", "out")},
        "mlp": {"wi_0": kernel(size, 64), "wi_1": kernel(size, 64), "wo": kernel(64, size)},
    }
    params = {
        "decoder": {"layers": layers, "logits_dense": {"kernel": struct(size, 96)}},
        "token_embedder": {"embedding": struct(96, size)},
    }
    return find_sites(loss, params, jax.ShapeDtypeStruct((16,), "int32"))


def decisions(text: str, sites: Sites) -> dict[Any, Any]:
    plan = make_plan(parse(text), sites)
    check_plan(plan)
    return {key: decision.recipe for key, decision in plan.decisions(plan.phases[0]).items()}


QWIX = """
import jax.numpy as jnp
import qwix

rules = [
    qwix.QtRule(module_path="decoder/layers/self_attention/.*"),
    qwix.QtRule(
        module_path=r"decoder/layers/(mlp|moe)/w(i_[0-9]+|o)", weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e5m2, disable_channelwise_axes=True, tile_size=128,
    ),
    qwix.QtRule(module_path=".*", weight_qtype="nvfp4", act_qtype="nvfp4", bwd_qtype="nvfp4",
                bwd_stochastic_rounding="uniform"),
    qwix.QuantizationRule(module_path=".*logits_dense", weight_qtype=jnp.int8, act_qtype=jnp.int8),
]
"""
MEGATRON = """
configs:
  high: { transformer_engine_config_type: TEQuantizationParams, training_recipe: {} }
  fp8:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: { fp8_quantization_recipe: tensorwise, fp8_format: hybrid }
    evaluation_recipe: {}
  fp4:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: { fp4_quantization_recipe: nvfp4, override_nonquantized_autocast: true }
  kitchen: { kitchen_config_type: QLinearParams, recipe_idx: 3 }
matchers:
  off: { config: high, type: glob, pattern: "*", enabled: false }
  last: { config: high, type: glob, pattern: "*layers.3.*", enabled: true }
  fc: { config: fp4, type: glob, pattern: "*linear_fc[12]", enabled: true }
  qkv: { config: fp8, type: glob, pattern: "*linear_qkv*", enabled: true }
  other: { config: kitchen, type: glob, pattern: "*output*", enabled: true }
"""
MODELOPT = """
imports: { nvfp4: configs/numerics/nvfp4, off: configs/units/off }
metadata: { recipe_type: ptq }
quantize:
  algorithm: awq_lite
  quant_cfg:
    - $import: off
    - { quantizer_name: '*mlp*weight_quantizer', cfg: { $import: nvfp4 } }
    - { quantizer_name: '*mlp*input_quantizer', cfg: { $import: nvfp4 } }
    - { quantizer_name: '*self_attention.query.weight_quantizer', cfg: { num_bits: [4, 3], axis: null } }
    - { quantizer_name: '*self_attention.query.input_quantizer', cfg: { num_bits: e4m3 } }
    - { quantizer_name: '*self_attention.out.weight_quantizer', cfg: { num_bits: 4, block_sizes: { -1: 128 } } }
    - { quantizer_name: '*[kv]_bmm_quantizer', cfg: { num_bits: e4m3 } }
    - { quantizer_name: '*wo*', enable: false }
    - { quantizer_name: '*', parent_class: nn.Embedding, enable: false }
"""
UNITS = {
    "configs/numerics/nvfp4.yaml": "num_bits: e2m1\nblock_sizes: { -1: 16, type: dynamic, scale_bits: e4m3 }\n",
    "configs/units/off.yaml": "quantizer_name: '*'\nenable: false\n",
}

CASES = {
    "qwix": (
        "rules.py", QWIX, {},
        f"* -> nvfp4(sr=grad)\n{MLP} -> fp8\ndecoder.layers.self_attention -> keep",
        ["rule 4 (.*logits_dense): weights in int8 with activations in int8",
         "rule 2 (decoder/layers/(mlp|moe)/w(i_[0-9]+|o)): tile_size=128"],
    ),
    "megatron": (
        "recipe.yaml", MEGATRON, {"linear_fc1": "wi_?", "linear_fc2": "wo", "linear_qkv": "{query,key,value}"},
        f"{ATTENTION.replace(',out', '')} -> fp8\n{MLP} -> {NV}\ndecoder.layers[3] where weight -> bf16",
        ["matcher 'other': config 'kitchen' is not of type TEQuantizationParams", "config 'fp8': evaluation_recipe",
         "config 'fp4': override_nonquantized_autocast=True: the rule holds always"],
    ),
    "te": (
        "te.env", "export NVTE_NVFP4_DISABLE_RHT=1\nNVTE_FUSED_ATTN=0\nNVFP4BlockScaling()\n", {},
        f"{MLP}, {ATTENTION} -> nvfp4(sr=grad, scale2d=weights)",
        ["NVTE_FUSED_ATTN=0"],
    ),
    "modelopt": (
        "recipe.yaml", MODELOPT, {},
        "decoder.layers.mlp.wi_? -> nvfp4(backward=dequantized)\n"
        "decoder.layers.self_attention.query -> fp8(backward=dequantized)",
        ["algorithm=awq_lite: scales come from the current maximum",
         "*self_attention.out.weight_quantizer: num_bits=4 with block_sizes={-1: 128}",
         "*self_attention.out: only weights in another format",
         "*[kv]_bmm_quantizer: not an operand of a linear"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", CASES)
def test_it_plans_maxtext_as_the_policy_written_by_hand(tool: str, maxtext: Sites, tmp_path: Path) -> None:
    name, text, renames, by_hand, findings = CASES[tool]
    for path, unit in {name: text, **UNITS}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(unit)
    imported = import_policy(tool, tmp_path / name, renames)
    keeping = "\n".join(line for line in imported.text.splitlines() if "output" not in line)
    assert decisions(keeping, maxtext) == decisions(by_hand, maxtext), imported.text
    assert list(imported.findings) == findings
    assert all(f"# no equivalent: {finding}" in imported.text for finding in findings)


NAMES = [".".join(parts) for n in (1, 2, 3) for parts in itertools.product(("a", "ab", "b_a"), repeat=n)]
PATTERNS = [
    "*",
    "a*",
    "*a",
    "*b*",
    "*.a",
    "a.*.a",
    "a*a",
    "*a.*b*",
    "[ab]*",
    "?b",
    "*b.?",
    "a.*a",
    "a*.a",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_glob_selects_what_fnmatch_matches_and_what_is_below(pattern: str) -> None:
    expected = {n for n in NAMES if any(fnmatch.fnmatchcase(p, pattern) for p in _scopes(n, pattern))}
    assert _selected(glob_selectors(pattern)) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        ".*",
        ".*/a",
        ".*b.*",
        "a/(a|ab)",
        "(a|b_a)/.*a",
        "a|ab/a",
        r"\w+/a",
        "^a/[^/]*/b_a$",
        ".*a/.*b",
        ".b",
        r"a/.+/a",
    ],
)
def test_a_regular_expression_selects_what_it_matches_and_what_is_below(pattern: str) -> None:
    def matches(name: str) -> bool:
        return re.fullmatch(pattern, name.replace(".", "/")) is not None

    expected = {n for n in NAMES if any(matches(p) for p in _scopes(n, pattern))}
    assert _selected(regex_selectors(pattern)) == expected


def _scopes(name: str, pattern: str) -> list[str]:
    """The scopes of a name; for a pattern with any scope first, also those inside another scope."""
    parts = name.split(".")
    scopes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return [*scopes, *(f"0.{scope}" for scope in scopes if pattern.startswith(("*.", ".*/")))]


def _selected(text: str) -> set[str]:
    (rule,) = parse(f"{text} -> fp8").rules
    patterns = [pattern for selector in rule.selectors for pattern in selectors.expand_selector(selector)]
    return {n for n in NAMES if any(selectors.matches(p, selectors.parse_path(n)) for p in patterns)}


@pytest.mark.parametrize("pattern", ["(?=a)b", "a{2}", "(a|b)+", "[ab]c", "a+"])
def test_a_regular_expression_that_is_no_pattern_is_a_finding(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="the regular expression"):
        regex_selectors(pattern)
    rules = [{"module_path": pattern, "weight_qtype": "nvfp4", "act_qtype": "nvfp4"}, {"module_path": ".*"}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    imported = import_policy("qwix", tmp_path / "rules.json", {})
    assert len(imported.findings) == 1
    assert parse(imported.text).rules[0].recipe == parse("* -> keep").rules[0].recipe


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("te_nvfp4_no_rht", "nvfp4(sr=grad, scale2d=weights)"),
        ("recipe.DelayedScaling(fp8_format=recipe.Format.E4M3, amax_history_len=16)", "fp8(grad=e4m3)"),
        ("Float8CurrentScaling(fp8_dpa=True)", "fp8"),
        ("MXFP8BlockScaling()", "mxfp8"),
        ("Float8BlockScaling()", "keep"),
        ("NVFP4BlockScaling(backward_override='high_precision')",
         "split(fprop=nvfp4(scale2d=weights), dgrad=bf16, wgrad=bf16)"),
        ("NVTE_BACKWARD_OVERRIDE=dequantized\nNVFP4BlockScaling()", "nvfp4(scale2d=weights, backward=dequantized)"),
        ("NVTE_NVFP4_4OVER6=all\nNVTE_NVFP4_DISABLE_RHT=1\nNVTE_NVFP4_DISABLE_2D_QUANTIZATION=1",
         "nvfp4(sr=grad, scale=four_over_six, scale_error=mae)"),
    ],
)  # fmt: skip
def test_recipes_of_transformer_engine(text: str, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "te.txt").write_text(text)
    imported = import_policy("te", tmp_path / "te.txt", {})
    first, second = parse(imported.text), parse(f"* -> {recipe}")
    assert first.resolver()(first.rules[0].recipe) == second.resolver()(second.rules[0].recipe)
    lossy = ("Delayed", "dpa", "Float8Block")
    assert bool(imported.findings) == any(word in text for word in lossy)


@pytest.mark.parametrize(
    ("tool", "text", "message"),
    [
        ("qwix", "rules = [", "neither JSON nor Python: line 1"),
        ("qwix", "x = 1", "has no rule of qwix"),
        ("qwix", "QtRule(module_path=f())", "line 1: 'f()' is not a constant"),
        ("megatron", "configs: {}", "has no mapping 'matchers'"),
        ("megatron", "a: [", "is not YAML"),
        ("modelopt", "{}", "has no 'quant_cfg'"),
        (
            "modelopt",
            "quant_cfg: [{ $import: units/x }]",
            "put it beside the file, or install nvidia-modelopt",
        ),
        ("te", "nothing", "must name one recipe of Transformer Engine, not 0"),
    ],
)
def test_a_file_of_something_else_is_refused(tool: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ImportFailed, match=re.escape(message)):
        import_policy(tool, tmp_path / "file", {})


def test_the_command_writes_the_policy_and_exits_with_1_if_something_is_lost(tmp_path: Path) -> None:
    (tmp_path / "te.env").write_text("NVTE_NVFP4_DISABLE_RHT=1\nNVTE_DEBUG=1\n")
    result = policyc("import", "te.env", "--from", "te", "--out", "te.policy", cwd=tmp_path)
    assert result.code == 1
    assert result.err.startswith("policyc: no equivalent: NVTE_DEBUG=1\n")
    assert "te.policy:3:1: warning[no-high-precision-tail]" in result.err
    assert "nvfp4(sr=grad, scale2d=weights)" in (tmp_path / "te.policy").read_text()
