"""One step of the Llama: the same losses on every mesh and in every layout, and faulty steps that change nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler import pipeline
from policyc.compiler.rewriting.run_step import current_run_step
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.models.llama import command_line, configs, data, metrics, optimizer, partition, train_step
from policyc.models.llama import model as llama
from tests.support import llama_runs
from tests.support.jaxpr_tools import primitive_counts, without_dead_code

SMALL = configs.ModelConfig(**llama_runs.SMALL, compute=llama_runs.DTYPE)
RUN = configs.RunConfig(**llama_runs.SHORT)
# The reference on one device has a limit on spikes and a loss scale, so that its compiled step serves the tests of
# faults too. Neither changes a loss: the loss falls, and the scale is a power of two.
REFERENCE_RUN = dataclasses.replace(RUN, spike=1.0, loss_scale=8.0)
STEPS = 3


@cache
def single_device_step() -> Any:
    """The jitted step of the plain layout on one device."""
    return train_step.make_train_step(SMALL, REFERENCE_RUN, llama_runs.make_mesh())


@cache
def initial_values() -> Any:
    """The initial state on one device, as numpy arrays: a step donates its state."""
    return jax.device_get(train_step.init_state(SMALL, REFERENCE_RUN, llama_runs.make_mesh()))


def state_with(**entries: float) -> Any:
    """The initial state on one device, with other values for some entries. Its shardings are those of the step."""
    abstract = train_step.abstract_state(SMALL, REFERENCE_RUN, llama_runs.make_mesh())
    values = initial_values() | {name: np.float32(value) for name, value in entries.items()}
    return jax.tree.map(lambda value, array: jax.device_put(value, array.sharding), values, abstract)


def batches(mesh: jax.sharding.Mesh) -> Iterator[Any]:
    """The batches of a run, on the devices of a mesh."""
    sharding = partition.sharding(mesh, ("batch", "sequence"))
    return (jax.device_put(batch, sharding) for batch in data.BatchSource(RUN, SMALL.vocab))


def run_steps(step: Any, state: Any, mesh: jax.sharding.Mesh) -> list[float]:
    """The losses of the first steps."""
    losses = []
    for batch in islice(batches(mesh), STEPS):
        state, measured = step(state, batch)
        losses.append(float(measured["loss"]))
    return losses


@cache
def plain_losses() -> list[float]:
    return run_steps(single_device_step(), state_with(), llama_runs.make_mesh())


def check_same_losses(axes: dict[str, int], **settings: Any) -> None:
    """Runs the same weights and data on a mesh, with other settings, and compares with the plain run on one device."""
    names = {f.name for f in dataclasses.fields(configs.ModelConfig)}
    config = dataclasses.replace(SMALL, **{k: v for k, v in settings.items() if k in names})
    run = dataclasses.replace(RUN, **{k: v for k, v in settings.items() if k not in names})
    mesh = llama_runs.make_mesh(**axes)
    state = train_step.init_state(config, run, mesh)
    losses = run_steps(train_step.make_train_step(config, run, mesh), state, mesh)
    # All is float32, and only the order of sums differs: some ulps (6e-8) of a gradient, which Adam divides by its own
    # size, so that an entry near zero may change its sign. One such entry moves the loss far less than 1e-5.
    np.testing.assert_allclose(losses, plain_losses(), rtol=1e-5)
    assert np.ptp(losses) > 1e-3  # the loss changes from step to step


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one():
    check_same_losses(llama_runs.MESH)


@pytest.mark.slow
def test_layouts_give_the_losses_of_the_plain_one():
    """All at once, unrolled. Those that may be combined with a scan are combined with one on several devices."""
    check_same_losses({}, accumulate=4, loss_chunks=4, remat="dots", scan=False)


@pytest.mark.slow
def test_layouts_on_eight_devices_give_the_losses_of_the_plain_one():
    """With more devices on the axis tensor than there are heads of keys."""
    check_same_losses({"data": 2, "tensor": 4}, accumulate=2, loss_chunks=4, remat="full")


def test_a_chunked_head_is_gathered_once():
    """Before the loop over chunks. Inside it, XLA for GPUs would gather the head again for every chunk, twice."""
    config, run = dataclasses.replace(SMALL, loss_chunks=4), RUN
    mesh = llama_runs.make_mesh(fsdp=8)
    state, batch = train_step.abstract_state(config, run, mesh), partition.abstract_batch(run, mesh)
    jaxpr = jax.make_jaxpr(lambda params, batch: llama.loss(params, batch, config, mesh))(
        state["params"], batch
    )
    (loop,) = [
        e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == config.loss_chunks
    ]
    (head,) = [v for v in loop.invars if v.aval.shape == (config.width, config.vocab)]
    (gather,) = [e for e in jaxpr.eqns if head in e.outvars]
    assert gather.primitive.name == "custom_jvp_call"
    (constraint,) = gather.params["call_jaxpr"].eqns
    assert constraint.params["sharding"].spec == jax.sharding.PartitionSpec(None, "tensor")


def test_tokens_are_sent_to_the_table_and_not_the_table_to_the_tokens():
    """The table stays sharded: a gathered one would be many times as large as the embeddings of a batch."""
    mesh = llama_runs.make_mesh(fsdp=8)
    table = partition.abstract_array((SMALL.vocab, SMALL.width), jnp.float32)
    tokens = partition.abstract_array((8, 16), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda table, tokens: llama.embed(table, tokens, "bfloat16", mesh))(table, tokens)
    constraints = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    assert [(str(e.invars[0].aval.dtype), e.params["sharding"].spec) for e in constraints] == [
        ("int32", jax.sharding.PartitionSpec(("data", "expert"), "context")),
        ("float32", jax.sharding.PartitionSpec(("data", "expert"), "context", "fsdp")),
        ("bfloat16", jax.sharding.PartitionSpec(("data", "fsdp", "expert"), "context", None)),
    ]
    assert not any(v is jaxpr.jaxpr.invars[0] for e in constraints for v in e.invars)


# ---- weights gathered once per step

COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "all_to_all")


def test_weights_are_gathered_and_gradients_added_once_per_step() -> None:
    """Outside the loop over the parts of a batch, which has no collective. There a policy quantizes weights, too."""
    run = dataclasses.replace(RUN, batch=16, accumulate=4, gather="once")
    config, mesh = dataclasses.replace(SMALL, compute="bfloat16"), llama_runs.make_mesh(data=2, fsdp=2)
    state, batch = train_step.abstract_state(config, run, mesh), partition.abstract_batch(run, mesh)
    with policyc.active("layers -> mxfp8"):
        jaxpr = train_step.make_train_step(config, run, mesh).trace(state, batch).jaxpr
    (on_device,) = [e for e in jaxprs.all_equations(jaxpr) if e.primitive.name == "shard_map"]
    eqns = on_device.params["jaxpr"].eqns
    scans = [e for e in eqns if e.primitive.name == "scan"]
    (parts,) = [e for e in scans if e.params["length"] == run.accumulate]
    assert not any(name.startswith(COLLECTIVES) for name in primitive_counts(parts.params["jaxpr"]))

    weights = 9  # seven of a block, the table of the embedding, and the head
    gathered = [e for e in eqns if e.primitive.name == "all_gather"]
    assert sorted(str(e.invars[0].aval.dtype) for e in gathered) == ["bfloat16"] * (weights - 1) + ["float32"]
    scattered = [e for e in eqns if e.primitive.name == "reduce_scatter"]
    assert [str(e.invars[0].aval.dtype) for e in scattered] == ["float32"] * weights
    # Each weight of a block for fprop and for dgrad, all layers at once.
    before = [e.primitive.name for e in eqns[: eqns.index(parts)]]
    assert before.count("mxfp8_quantize") == 2 * 7


@pytest.mark.slow
def test_weights_gathered_once_give_the_losses_of_the_plain_layout() -> None:
    check_same_losses({"data": 2, "fsdp": 2}, gather="once", accumulate=2, remat="quantized")


# ---- faulty steps


def step_from(**entries: float) -> tuple[Any, Any]:
    """One step from the initial state with other values for some entries."""
    return single_device_step()(state_with(**entries), next(batches(llama_runs.make_mesh())))


@pytest.mark.any_jax
def test_a_good_step_changes_the_weights():
    after, measured = step_from()
    assert measured["is_fine"]
    # The initial weights predict nothing: every token is equally likely.
    assert float(measured["loss"]) == pytest.approx(math.log(SMALL.vocab), rel=0.05)
    assert not np.array_equal(after["params"]["embed"], initial_values()["params"]["embed"])
    assert (int(after["skipped"]), float(after["scale"])) == (0, 8.0)
    # The gradient norm is that of the unscaled loss.
    _, scaled = step_from(scale=1024)
    # The scales are powers of two; what differs is the order of sums.
    assert float(scaled["grad_norm"]) == pytest.approx(float(measured["grad_norm"]), rel=1e-5)


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("entries", "scale", "counted"),
    [({"scale": 3e38}, 1.5e38, 1), ({"mean": 1.0}, 8.0, 0)],
    ids=["overflow", "spike"],
)
def test_a_faulty_step_changes_no_weight(entries, scale, counted):
    """An overflow of the scaled gradient is skipped and counted. A spike stops the run: the state is that before it."""
    after, measured = step_from(**entries)
    assert not measured["is_fine"]
    for name in ("params", "adam"):
        jax.tree.map(np.testing.assert_array_equal, after[name], initial_values()[name])
    assert (int(after["skipped"]), int(after["step"])) == (counted, counted)
    assert int(after["faults"]) == 1 - counted
    assert float(after["scale"]) == pytest.approx(scale)


@pytest.mark.any_jax
@pytest.mark.slow
def test_no_step_after_a_fault_changes_anything():
    """The host learns of a fault one step late. The step that it has started meanwhile must not count."""
    step, batch = single_device_step(), next(batches(llama_runs.make_mesh()))
    stopped, _ = step(state_with(mean=1.0), batch)
    before = jax.device_get(stopped)
    after, measured = step(stopped | {"mean": jnp.float32(100.0)}, batch)  # is fine by itself
    assert not measured["is_fine"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after) | {"mean": before["mean"]}, before)


@pytest.mark.any_jax
def test_a_batch_without_a_prediction_is_faulty() -> None:
    """Such as one of end tokens only, under a document mask. Its loss is no 0, which would look like a success."""
    batch = next(batches(llama_runs.make_mesh()))
    batch["mask"] = jnp.zeros_like(batch["mask"])
    after, measured = single_device_step()(state_with(), batch)
    assert math.isnan(measured["loss"])
    assert not measured["is_fine"]
    jax.tree.map(np.testing.assert_array_equal, after["params"], initial_values()["params"])


# ---- learning rate, weight decay, FLOPs, sizes


def test_a_policy_is_told_the_step_and_the_seed(monkeypatch):
    """The step is that of the state, as a traced value: a resumed run continues with the same random bits."""
    told = []

    def record() -> Any:
        told.append(current_run_step())
        return told[-1]

    monkeypatch.setattr(pipeline, "current_run_step", record)
    run, mesh = dataclasses.replace(RUN, seed=5, accumulate=2), llama_runs.make_mesh()
    step = train_step.make_train_step(SMALL, run, mesh)
    with policyc.active("layers.* where weight -> mxfp4(sr=grad)"):
        traced = step.trace(train_step.abstract_state(SMALL, run, mesh), partition.abstract_batch(run, mesh))
    assert [(each.seed, isinstance(each.step, jax.core.Tracer)) for each in told] == [(5, True)]
    counters = [v for v in traced.jaxpr.jaxpr.invars if v.aval.shape == () and v.aval.dtype == jnp.int32]
    words = [e for e in traced.jaxpr.eqns if e.outvars[0].aval.dtype == jnp.uint32]
    readers = [e for e in words if any(v is c for v in e.invars for c in counters)]
    assert readers, "the step of the state is hashed"


def test_validation_runs_under_the_policy_and_without_it():
    """Two losses of the same batch: the one as in training, whose gradient is dropped, and the plain one."""
    mesh = llama_runs.make_mesh()
    params, batch = train_step.abstract_state(SMALL, RUN, mesh)["params"], partition.abstract_batch(RUN, mesh)
    with policyc.active("mlp.down_proj -> mxfp8"):
        traced = train_step.make_eval_step(SMALL, RUN, mesh, under_policy=True).trace(params, batch)
    names = {"validation_loss", "validation_loss_evaluated_in_bf16"}
    assert set(traced.out_info) == names
    with_one_output = {
        name: without_dead_code(traced.jaxpr.replace(jaxpr=traced.jaxpr.jaxpr.replace(outvars=[variable])))
        for name, variable in zip(sorted(names), traced.jaxpr.jaxpr.outvars, strict=True)
    }
    quantizers = {name: primitive_counts(each)["mxfp8_quantize"] for name, each in with_one_output.items()}
    assert quantizers == {"validation_loss": 2, "validation_loss_evaluated_in_bf16": 0}


def test_the_learning_rate_follows_its_schedule():
    def rates(schedule: str) -> Any:
        run = configs.RunConfig(
            steps=100, learning_rate=1.0, schedule=schedule, warmup=0.1, decay=0.2, final=0.1
        )
        return jax.jit(lambda steps: optimizer.learning_rate(run, steps))(jnp.arange(100))

    def about(rate: float) -> Any:
        return pytest.approx(rate, abs=2**-21)  # a few roundings of fp32 numbers up to 1, and its cosine

    cosine, wsd, constant = map(rates, ("cosine", "wsd", "constant"))
    for schedule in (cosine, wsd, constant):
        assert float(schedule[0]) == about(0.1)
        assert float(schedule[9]) == about(1.0)
    assert float(cosine[54]) == about(0.55)  # half way down
    assert float(wsd[79]) == about(1.0)
    assert float(wsd[89]) == about(0.55)
    for schedule, last in ((cosine, 0.1), (wsd, 0.1), (constant, 1.0)):
        assert float(schedule[99]) == about(last)


def test_norms_do_not_decay():
    transform = optimizer.make_optimizer(configs.RunConfig(weight_decay=0.5))
    params = {
        "norm": np.ones(2),
        "layers": {"mlp_norm": np.ones((2, 2)), "mlp": {"up_proj": np.ones((2, 2))}},
    }

    @jax.jit
    def update(params: Any) -> Any:
        return transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)[0]

    updates = update(params)
    assert float(updates["layers"]["mlp"]["up_proj"][0, 0]) == 0.5
    assert float(updates["norm"][0]) == float(updates["layers"]["mlp_norm"][0, 0]) == 0


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama3_8b", (0.657, 0.157, 0.061, 0.125)), ("llama3_405b", (0.784, 0.171, 0.005, 0.040))],
)
def test_flops_have_the_published_shares(name, published):
    """The shares of MLP, projections, head and attention, at sequence 8192."""
    config, _ = configs.CONFIGS[name]
    total = metrics.flops_per_token(config, 8192)
    projections = config.heads * config.head_dim + config.kv_heads * config.head_dim
    weights = 3 * config.hidden * config.layers, 2 * projections * config.layers, config.vocab
    shares = [6 * config.width * n / total for n in weights]
    # Three decimals are published. The published share of 405B's attention is one unit higher.
    np.testing.assert_allclose([*shares, 1 - sum(shares)], published, atol=1.1e-3)


@pytest.mark.parametrize(
    ("name", "size"),
    [("30m", 30e6), ("50m", 50e6), ("100m", 103e6), ("200m", 203e6), ("1b", 1.50e9), ("llama3_8b", 8.03e9),
     ("mixtral_8x7b", 46.7e9), ("llama3_70b", 70.6e9), ("llama3_405b", 405.9e9)],
)  # fmt: skip
def test_configurations_have_the_published_number_of_parameters(name, size):
    """The published numbers of the small ones do not count embedding and head."""
    config, _ = configs.CONFIGS[name]
    total = sum(math.prod(spec.shape) for spec in jax.tree.leaves(llama.param_specs(config)))
    if name.endswith("m"):
        total -= 2 * config.vocab * config.width
    assert total == pytest.approx(size, rel=0.02)


def test_only_the_experts_of_a_token_count():
    """Mistral publishes 12.9 billion active parameters. Of these, GEMMs read all but the embedding and the norms."""
    config, _ = configs.CONFIGS["mixtral_8x7b"]
    total, active = metrics.count_parameters(config)
    assert active == pytest.approx(12.9e9, rel=0.002)
    # Six of the eight experts of each layer are idle.
    assert total - active == 32 * 6 * 3 * 4096 * 14336
    weights = active - config.vocab * config.width - (2 * config.layers + 1) * config.width
    assert metrics.flops_per_token(config, 8192) == 6 * weights + 6 * config.layers * 32 * 128 * 8192
    dense, _ = configs.CONFIGS["llama3_8b"]
    assert len(set(metrics.count_parameters(dense))) == 1


# ---- settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 9 --accumulate 3", "batch 9 is not a multiple of 24"),
        (
            "--batch 4",
            r"batch 4 is not a multiple of 8 \(accumulate x data x fsdp\): --batch 8 fits",
        ),
        ("--batch 8 --accumulate 3", "batch 8 is not a multiple of 24"),
        ("--sequence 10 --loss-chunks 4", "sequence 10 is not a multiple of 4"),
        ("--fsdp-axis 3", "needs a multiple of 3 devices, but there are 8"),
        ("--tensor-axis 8 --batch 8", "heads 4 is not a multiple of 8"),
        ("--tensor-axis 2 --gather once", "--gather once: every device computes with whole weights"),
        ("--context-axis 2 --tensor-axis 2 --sequence 7", "7 is not a multiple of 2"),
        ("--expert-axis 2", "an expert axis of 2 splits the experts, but the model has none: add --experts"),
        (
            "--expert-axis 2 --experts 4 --batch 9",
            r"9 is not a multiple of 8 \(accumulate x data x fsdp x expert\)",
        ),
        ("--expert-axis 4 --experts 6", r"experts 6 is not a multiple of 4 \(expert\)"),
        ("--expert-axis 2 --experts 4 --gather once", "so expert, tensor and context must be 1"),
    ],
)
def test_meshes_that_do_not_divide_the_sizes_are_refused(arguments, message):
    _, config, run = command_line.parse_args(arguments.split())
    with pytest.raises(configs.ConfigError, match=message):
        partition.make_mesh(config, run)


def test_every_setting_is_an_option():
    name, config, run = command_line.parse_args(
        ["--config", "100m", "--layers", "3", "--no-scan", "--z-loss", "1e-4"]
    )
    values = (name, config.layers, config.scan, config.width, run.z_loss, run.learning_rate)
    assert values == ("100m", 3, False, 1024, 1e-4, 9e-4)


def test_the_help_has_the_defaults_of_the_configuration(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse_args(["--config", "100m", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--learning-rate X peak learning rate (default: 0.0009)" in text
    assert "--layers N number of transformer blocks (default: 8)" in text
    assert "devices and hosts:" in text


def test_options_go_before_a_file_of_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('config = "100m"\nlearning-rate = 1e-4\nbatch = 64\nz_loss = 1\nscan = false\n')
    config_name, config, run = command_line.parse_args(["--settings", str(path), "--batch", "32"])
    values = (config_name, config.width, config.scan, run.learning_rate, run.batch, run.z_loss)
    assert values == ("100m", 1024, False, 1e-4, 32, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", "there is no option '--learning-rat=1': did you mean --learning-rate?"),
        ("batch = 1.5", "run.toml: error: argument --batch: invalid int value: '1.5'"),
        ("batch = true", "argument --batch: invalid int value: 'True'"),
        ("batch = [1]", "batch = [1]: expected a string, a number, true or false"),
        ('schedule = "cosin"', "argument --schedule: invalid choice: 'cosin'"),
        ('config = "7b"', "there is no configuration '7b'"),
        ("batch = ", "Invalid value"),
        ('settings = "other.toml"', "a settings file cannot name another settings file"),
    ],
)
def test_a_faulty_file_of_settings_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SystemExit) as end:
        command_line.parse_args(["--settings", str(tmp_path / "run.toml")])
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
