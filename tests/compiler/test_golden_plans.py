"""Golden plans: sites, kinds, decisions and the lowered gradient of a fixed corpus of models and policies.

A refactoring leaves the files of `tests/golden/plans` as they are, byte for byte. After a change that is meant to
change plans, `UPDATE_SNAPSHOTS=1 pytest tests/compiler/test_golden_plans.py` writes them again. Read the diff.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

import policyc
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.tables.plan_json import as_json
from policyc.language.bundled import bundled_policies
from policyc.language.loader import parse
from policyc.models.llama import model as llama
from policyc.models.llama.configs import find_config
from tests.support import kind_programs, layered_models, programs
from tests.support.gemms import slow
from tests.support.jaxpr_tools import struct

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
JAX_VERSION = "0.10.2"
"""The version whose lowered gradients the digests are of. Other versions lower the same jaxpr to another text."""

EVERYTHING = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
BY_LAYER = "* -> mxfp8; * @ wgrad -> fp8; * where attention -> fp8(outer=row); * where layer >= -1 -> keep"
BY_INDEX = "* -> nvfp4; layers[-1:] -> bf16; * where k % 16 != 0 -> keep"
SCHEDULED = "* -> te_nvfp4\nafter 50% { * @ fprop -> bf16 }\nrecipe te_nvfp4 = nvfp4(rht=wgrad, sr=grad)"


@dataclass(frozen=True)
class Model:
    """A loss and its arguments. `policies` are those whose plans are stored; the lowered gradient is of the first."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    policies: tuple[str, ...]


def _llama(policies: tuple[str, ...], **settings: Any) -> Model:
    config = replace(find_config("tiny")[0], **settings)
    params = jax.tree.map(
        lambda spec: struct(*spec.shape),
        llama.param_specs(config),
        is_leaf=lambda x: isinstance(x, llama.ParamSpec),
    )
    tokens = struct(2, 32, dtype="int32")
    batch = {"tokens": tokens, "targets": tokens, "mask": struct(2, 32)}

    def loss(params: Any, batch: Any) -> Any:
        return sum(llama.loss(params, batch, config))

    return Model(loss, (params, batch), policies)


def _corpus() -> Iterator[tuple[str, Model]]:
    yield "llama_scanned", _llama((*sorted(bundled_policies()), BY_LAYER, SCHEDULED))
    yield "llama_unrolled", _llama(("llama3_8b_nvfp4", BY_LAYER, SCHEDULED), scan=False)
    yield "llama_experts", _llama(("te_nvfp4", BY_LAYER), experts=4)
    for remat in layered_models.REMAT:
        yield f"layered_{remat}", _layered(remat, layered_models.STACKED)
    yield "layered_unrolled", _layered("none", layered_models.UNROLLED)
    for seed in range(12):
        random = programs.program(seed)
        yield f"random_{seed}", Model(random.loss, random.args, (EVERYTHING, BY_LAYER))
    for name, program in kind_programs.BY_NAME.items():
        yield f"kinds_{name}", Model(program.loss, (program.params,), (BY_LAYER,))


def _layered(remat: str, params: Any) -> Model:
    x = layered_models.X[0]
    return Model(layered_models.model(remat), (params, x), (EVERYTHING, BY_INDEX, BY_LAYER))


MODELS = dict(_corpus())
RANDOM = [name for name in MODELS if name.startswith("random")]


def _describe(model: Model) -> str:
    """The plans of a model as text: its sites once, then the decisions and rules of each policy."""
    traced = policyc.plan("* -> keep", model.loss, *model.args)
    lines: list[str] = []
    for policy in model.policies:
        loaded = policyc.load(policy) if policy in bundled_policies() else parse(policy)
        plan = make_plan(loaded, traced.sites)
        data = json.loads(as_json(plan))
        if not lines:
            lines += [_site_line(site) for site in data["sites"]]
            lines += [_line({"other": other}) for other in data["other_products"]]
        lines += ["", f"# {policy}"] + [_line({"rule": rule}) for rule in data["rules"]]
        lines += [
            f"{number} {phase} {_run_text(run)}"
            for number, site in enumerate(data["sites"])
            for phase, runs in site["decisions"].items()
            for run in runs
        ]
    return "\n".join(lines) + "\n"


def _site_line(site: Mapping[str, Any]) -> str:
    return _line({k: v for k, v in site.items() if k not in ("place", "decisions")})


def _run_text(run: Mapping[str, Any]) -> str:
    """The layers of a run and its products: rule, overridden rules, both operands and what runs them."""
    text = _line(run.get("layers", []))
    for gemm, product in run["products"].items():
        operands = zip(product["formats"], product["options"], strict=True)
        quantized = " x ".join(f"{name}({','.join(options)})" for name, options in operands)
        native = product.get("native", "")
        text += f"; {gemm} {product['rule']}{product['overridden']} {quantized} {product['backend']} {native}"
    return text.rstrip()


def _line(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _digest(model: Model) -> str:
    """A hash of the lowered gradient. Names of functions do not count: they may be renamed."""
    loss = policyc.apply(model.policies[0], model.loss, multiple_losses=True)
    with warnings.catch_warnings(action="ignore"):
        text = jax.jit(jax.grad(loss)).lower(*model.args).as_text()
    numbers: dict[str, str] = {}
    text = re.sub(r'@("[^"]*"|[\w.\-$]+)', lambda m: numbers.setdefault(m[0], f"@{len(numbers)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", MODELS)
def test_plans(name: str) -> None:
    _check(GOLDEN / f"{name}.txt", _describe(MODELS[name]))


@pytest.mark.skipif(jax.__version__ != JAX_VERSION, reason=f"the digests are those of JAX {JAX_VERSION}")
@pytest.mark.parametrize(
    "name", [slow(n) if n in RANDOM[4:] else n for n in MODELS if not n.startswith("kinds")]
)
def test_lowered_gradients(name: str) -> None:
    _check(GOLDEN / f"{name}.digest", _digest(MODELS[name]) + "\n")


def _check(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
