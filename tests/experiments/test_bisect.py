"""Recording and bisection on a small network. Faults that it must find: `test_planted_faults.py`."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from policyc.experiments.bisect import Bisection, NoCulprit
from policyc.experiments.program import Program
from policyc.experiments.record import RecordedLoss, record_loss
from policyc.language.loader import parse

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


@pytest.mark.any_jax
def test_a_policy_that_does_no_damage_has_no_culprit(recorded: RecordedLoss) -> None:
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
