"""Recording, scores and bisection on a small network. Faults that both must find: `test_planted_faults.py`.

The oracle of scores is the gradient of the loss with one product quantized, through the ordinary compiler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from policyc.compiler.planning.plan import make_plan
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.experiments.bisect import Bisection, NoCulprit
from policyc.experiments.program import Program
from policyc.experiments.record import RecordedLoss, record_loss
from policyc.experiments.search.candidates import parse_formats
from policyc.experiments.search.scores import BadLoss, Scores, score_formats
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.loader import parse
from policyc.language.recipes import Gemm
from tests.support.command import policyc

PROGRAM = """
import jax, jax.numpy as jnp

key = jax.random.key(0)
up = jax.random.normal(key, (2, 32, 64)) * 0.1
params = {{"layers": {{"up": up, "down": jax.random.normal(key, (2, 64, 32)) * 0.1}},
          "head": jax.random.normal(key, (32, 64)) * {head}}}

def loss(params, x, y):
    def block(h, layer):
        return h + jax.nn.silu(h @ layer["up"]) @ layer["down"], None
    h, _ = jax.lax.scan(block, x, params["layers"])
    {extra}
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h @ params["head"]), y[:, None], 1))

@jax.jit
def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

for number in range(10**6):
    k = jax.random.fold_in(key, number)
    params, _ = step(params, jax.random.normal(k, (64, 32)), jax.random.randint(k, (64,), 0, 64))
"""


def write_program(folder: Path, head: float = 0.1, extra: str = "") -> Program:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(head=head, extra=extra))
    return Program(str(path))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedLoss:
    return record_loss(write_program(tmp_path_factory.mktemp("plain"), extra="h = jnp.sin(h)"), 3)


@pytest.fixture(scope="module")
def scores(recorded: RecordedLoss) -> Scores:
    return score_formats(recorded, parse_formats("fp8"))


def test_a_program_is_stopped_once_its_batches_are_recorded(recorded: RecordedLoss) -> None:
    assert len(recorded.calls) == 3  # of a million steps
    batches = [next(c for c in call.consts if np.shape(c) == (64, 32)) for call in recorded.calls]
    key = jax.random.key(0)
    for number, batch in enumerate(batches):
        assert np.array_equal(batch, jax.random.normal(jax.random.fold_in(key, number), (64, 32)))


@pytest.mark.any_jax
def test_a_program_that_deletes_an_object_is_stopped_too(tmp_path: Path) -> None:
    """Python ignores an exception that is raised during a deletion, and the program would go on."""
    program = write_program(tmp_path)
    path = Path(program.name)
    slow = "\nimport time\nclass Slow:\n    def __del__(self):\n        time.sleep(0.1)\n"
    text = (
        path.read_text()
        .replace("range(10**6)", "range(100)")
        .replace("    params, _ = ", "    Slow()\n    params, _ = ")
    )
    path.write_text(slow + text + f"\nopen({str(tmp_path / 'ended')!r}, 'w')\n")
    assert len(record_loss(program, 2).calls) == 2
    assert not (tmp_path / "ended").exists()


def gradients(recorded: RecordedLoss, policy: str) -> list[list[np.ndarray]]:
    """The gradients of all batches under a policy, by the ordinary compiler."""
    plan = make_plan(parse(policy), recorded.sites, recorded.plan.execution)
    rewritten = rewrite(plan.sites, plan.decisions())

    def loss(inputs: Any, consts: Any) -> jax.Array:
        extra = rewritten.extra_inputs(inputs)
        return recorded.loss_of(jaxprs.evaluate_with_consts(rewritten.jaxpr, consts, *inputs, *extra))

    gradient = jax.jit(jax.grad(loss))
    return [[np.asarray(g, np.float64) for g in gradient(recorded.inputs, c.consts)] for c in recorded.calls]


@pytest.fixture(scope="module")
def plain(recorded: RecordedLoss) -> list[list[np.ndarray]]:
    return gradients(recorded, "* -> keep")


@pytest.mark.parametrize(
    ("site", "index", "gemm", "tolerance"),
    [
        # Wgrad is measured exactly; of the others one random tangent is a sample: seen within a quarter.
        ("layers.up", 1, Gemm.WGRAD, 1e-3),
        ("layers.down", 0, Gemm.FPROP, 0.5),
        ("head", None, Gemm.DGRAD, 0.5),
    ],
)
@pytest.mark.slow
@pytest.mark.any_jax
def test_noise_is_that_of_the_gradient_with_one_product_quantized(
    recorded: RecordedLoss,
    scores: Scores,
    plain: list[list[np.ndarray]],
    site: str,
    index: int | None,
    gemm: Gemm,
    tolerance: float,
) -> None:
    where = "" if index is None else f" where layer == {index}"
    quantized = gradients(recorded, f"{site.rpartition('.')[2]} @ {gemm}{where} -> fp8")
    count = len(plain)
    square = [sum(g[i] ** 2 for g in plain) / count for i in range(len(plain[0]))]
    adam = [np.where(s > 0, 1 / (np.sqrt(s) + 1e-8), 0) for s in square]
    mean = [sum(g[i] for g in plain) / count for i in range(len(square))]
    sampling = (
        sum(np.sum(p**2 * (s - m**2)) for p, s, m in zip(adam, square, mean, strict=True))
        * count
        / (count - 1)
    )
    errors = [
        [p * (a - b) for p, a, b in zip(adam, q, g, strict=True)]
        for q, g in zip(quantized, plain, strict=True)
    ]
    squared = sum(np.sum(e**2) for each in errors for e in each) / count
    score = scores.by_product[(site, index), gemm, "fp8"]
    # Of wgrad, the part that all batches share counts ten times.
    shared = sum(np.sum((sum(each[i] for each in errors) / count) ** 2) for i in range(len(square)))
    bias = max(0, shared - squared / count) * count / (count - 1) if gemm is Gemm.WGRAD else 0
    assert score.noise == pytest.approx((squared + 9 * bias) / sampling, rel=tolerance)


@pytest.mark.any_jax
def test_a_policy_that_does_no_harm_has_no_culprit(recorded: RecordedLoss) -> None:
    with pytest.raises(NoCulprit, match="no damage"):
        Bisection(parse("* -> fp8"), recorded, "loss", limit=1.0).run()


@pytest.mark.any_jax
def test_trials_are_not_repeated(
    recorded: RecordedLoss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bisection(parse("* -> fp8"), recorded, "loss", limit=1.0)
    with pytest.raises(NoCulprit):
        first.run()
    first.save(tmp_path / "trials.json")
    again = Bisection(parse("* -> fp8"), recorded, "loss", limit=1.0)
    assert again.load(tmp_path / "trials.json") == 1
    monkeypatch.setattr(again, "damage", None)
    with pytest.raises(NoCulprit, match="no damage"):
        again.run()
    before = tmp_path / "before.json"
    before.hardlink_to(tmp_path / "trials.json")
    again.save(tmp_path / "trials.json")
    assert not before.samefile(
        tmp_path / "trials.json"
    )  # replaced as a whole: a kill leaves one or the other
    before.write_text("")
    with pytest.raises(ValueError, match=r"was not written by policyc bisect"):
        again.load(before)
    other = Bisection(parse("* -> mxfp8"), recorded, "loss")
    with pytest.raises(ValueError, match="another policy"):
        other.load(tmp_path / "trials.json")


@pytest.mark.any_jax
@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_the_site(tmp_path: Path) -> None:
    recorded = record_loss(write_program(tmp_path, head=2e37), 1)
    with pytest.raises(BadLoss, match="is that of head"):
        score_formats(recorded, parse_formats("fp8"))


@pytest.mark.any_jax
@pytest.mark.slow
def test_a_program_that_repeats_one_batch_has_scores_and_a_note(tmp_path: Path) -> None:
    path = Path(write_program(tmp_path).name)
    path.write_text(path.read_text().replace("fold_in(key, ", "fold_in(key, 0 * "))
    scores = score_formats(record_loss(Program(str(path)), 2), parse_formats("fp8"))
    assert "all recorded batches are the same" in scores.notes[0]
    assert all(0 <= score.damage < np.inf for score in scores.by_product.values())


OWN_RULE = """
from jax.extend.core import Primitive
from jax.interpreters import mlir

fused = Primitive("fused")  # without a derivative, like the forward pass of a fused attention
fused.def_impl(jnp.sin)
fused.def_abstract_eval(lambda x: x)
mlir.register_lowering(fused, mlir.lower_fun(jnp.sin, multiple_results=False))
attention = jax.custom_vjp(fused.bind)
attention.defvjp(lambda h: (fused.bind(h), h), lambda h, g: (g * jnp.cos(h),))

def loss("""


@pytest.mark.any_jax
@pytest.mark.slow
def test_a_derivative_rule_of_the_program_is_scored_by_first_derivatives(
    scores: Scores, tmp_path: Path
) -> None:
    """The noise is about that by a tangent, which the same program without such a rule has."""
    path = Path(write_program(tmp_path, extra="h = attention(h)").name)
    path.write_text(path.read_text().replace("def loss(", OWN_RULE, 1))
    injected = score_formats(record_loss(Program(str(path)), 3), parse_formats("fp8"))
    assert not scores.notes
    assert "a custom derivative rule without a forward mode" in injected.notes[0]
    assert {gemm for _, gemm, _ in injected.by_product} == set(Gemm)
    for gemm in (Gemm.FPROP, Gemm.DGRAD):
        keys = [key for key in scores.by_product if key[1] is gemm]
        one, other = ([each.by_product[key].noise for key in keys] for each in (scores, injected))
        # One random tangent is a sample, and errors of all sites together mix.
        assert sum(one) / 2 < sum(other) < 2 * sum(one), gemm


@pytest.mark.any_jax
def test_a_loss_that_is_not_deterministic_is_told_so(tmp_path: Path) -> None:
    extra = (
        "import numpy as np; "
        "h = h * (1 + jax.pure_callback(lambda: np.float32(np.random.rand()), jax.ShapeDtypeStruct((), 'float32')))"
    )
    recorded = record_loss(write_program(tmp_path, extra=extra), 1)
    with pytest.raises(BadLoss, match="not deterministic"):
        score_formats(recorded, parse_formats("fp8"))


@pytest.mark.any_jax
@pytest.mark.slow
def test_the_command_line_writes_a_policy_and_says_what_cannot_be(tmp_path: Path) -> None:
    program = write_program(tmp_path).name
    result = policyc("search", "--formats", "fp8", "--batches", "1", "--speedup", "5", program)
    assert result.code == 1
    assert "no format makes this step faster" in result.err
    result = policyc("search", "--config", "tiny", "--speedup", "1.2", "--from", tmp_path)
    assert f"--from {tmp_path}: this is not the folder of a checkpoint" in result.err
    result = policyc("search", "--formats", "fp8", "--batches", "1", "--speedup", "te_nvfp4", program)
    assert result.code == 0, result.err
    assert "te_nvfp4 is predicted at 0." in result.err
    out = tmp_path / "found.policy"
    words = ("search", "--formats", "fp8", "--batches", "1", "--max-damage", "0", "--out", out, program)
    result = policyc(*words)
    assert result.code == 0, result.err
    assert "Found by search" in out.read_text()
    assert "one batch was recorded" in result.err
