"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` lists the options.

A run writes metrics, checkpoints and exports to a folder. It has no code for number formats: `policyc apply` runs it
under a policy. The calls of `policyc` below tell the policy about the run; without a policy they do nothing.
"""

import ctypes
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

try:
    import jax
    import numpy as np

    import policyc
    from policyc.models.llama import configs, data, metrics, model, optimizer, weights
    from policyc.models.llama.checkpoints import Checkpoints, lock_folder, saved_steps
    from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig
    from policyc.models.llama.preemption import INTERRUPTED, Stopped, StopRequest, end_together, watch_signals
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("policyc."):
        raise
    sys.exit(f"error: training needs the package '{error.name}': pip install 'policyc[train]'")
except KeyboardInterrupt:
    sys.exit(130)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        train(*configs.parse_args(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt) as stop:
        reason = str(stop) or "interrupted"
        print(f"{reason}: the same command resumes from the last checkpoint", file=sys.stderr)
        return stop.exit_code if isinstance(stop, Stopped) else INTERRUPTED
    return 0


def train(name: str, config: ModelConfig, run: RunConfig) -> None:
    if run.distributed:
        initialize: Any = jax.distributed.initialize
        initialize(run.coordinator, run.processes, run.process_id, heartbeat_timeout_seconds=run.heartbeat)
    with watch_signals(run.distributed) as stop, ExitStack() as stack:
        with end_together(run.distributed):
            trainer = Trainer(name, config, run, stop, stack)
        folder, step = trainer.folder, trainer.steps_done
        if step >= run.steps:
            print(f"{folder} is already at step {step} of {run.steps}: remove it, or choose another --out")
            return
        loss = trainer.train()
    if jax.process_index() == 0:
        print(f"loss {loss:.4f} after {run.steps} steps; metrics and checkpoints are in {folder}")


class Trainer:
    """One run. Nothing is written until settings, data, policy and initial weights are known to be good."""

    def __init__(
        self, name: str, config: ModelConfig, run: RunConfig, stop: StopRequest, stack: ExitStack
    ) -> None:
        self.config, self.run, self.mesh, self.stop = config, run, model.make_mesh(config, run), stop
        self.policy = os.environ.get("POLICYC_POLICY_SHA256")
        self.folder = Path(run.out or "runs/" + name + (f"-{self.policy[:8]}" if self.policy else ""))
        stop.announce(max(saved_steps(self.folder / "checkpoints"), default=0))
        self.source, self.batches = self.open_data("train")
        self.start_profile, self.stop_profile = make_profiler(run, self.folder)
        self.train_step = optimizer.make_train_step(config, run, self.mesh)
        self.eval_step = optimizer.make_eval_step(config, self.mesh, under_policy=self.policy is not None)
        self.observed_loss = partial(optimizer.mean_loss, config, self.mesh, run.accumulate)
        abstract_state = optimizer.abstract_state(config, run, self.mesh)
        policyc.set_step(0, total=run.steps)
        self.train_step.trace(abstract_state, model.abstract_batch(run, self.mesh))  # a bad policy fails here
        self.state, self.steps_done, self.checkpoints = self.resume(abstract_state, stack)

    def open_data(self, split: str) -> tuple[data.BatchSource, Iterator[model.Batch]]:
        """A source of batches, and its batches on the devices."""
        shape = (self.run.batch, self.run.sequence)
        sharding = model.sharding(self.mesh, ("batch", "sequence"))
        indices: Any = sharding.addressable_devices_indices_map(shape).values()
        rows = sorted({row for index in indices for row in range(self.run.batch)[index[0]]})
        source = data.BatchSource(self.run, self.config.vocab, rows, split)
        make_global: Any = jax.make_array_from_process_local_data
        return source, (make_global(sharding, batch, shape) for batch in source)

    def resume(
        self, abstract_state: optimizer.State, stack: ExitStack
    ) -> tuple[optimizer.State, int, Checkpoints]:
        """The state of the last whole checkpoint, or the initial state."""
        config, run, folder = self.config, self.run, self.folder / "checkpoints"
        is_new = not saved_steps(folder)
        if is_new:
            state = optimizer.init_state(config, run, self.mesh)
            if run.init_from:
                state["params"] = weights.load_safetensors(Path(run.init_from), config, self.mesh)
        stack.enter_context(lock_folder(self.folder))
        identity = configs.identity(config, run, self.policy) | {"contents_of_the_data": self.source.contents}
        checkpoints = Checkpoints(folder, run.keep, identity)
        if is_new:
            return state, 0, checkpoints
        state, position, step = checkpoints.restore(abstract_state, run.accept_changes)
        self.source.seek(position)
        return state, step, checkpoints

    def train(self) -> float:
        """Runs the remaining steps. Returns the last loss."""
        run = self.run
        first, last = map(int, run.profile_steps.split(":")) if run.profile else (0, 0)
        policyc.set_output_dir(self.folder)
        with ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            log = metrics.MetricsLog(stack, self.folder, self.config, run, self.steps_done)
            profile = stack.enter_context(ExitStack())  # an interrupted run keeps what it recorded
            stack.enter_context(end_together(run.distributed))
            self.stop.defer()
            for step in range(self.steps_done + 1, run.steps + 1):
                begin = time.perf_counter()
                batch = next(self.batches)
                stall = time.perf_counter() - begin
                policyc.set_step(step - 1, total=run.steps)
                if step == first:
                    self.start_profile()
                    profile.callback(self.stop_profile)
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    self.state, measured = self.train_step(self.state, batch)
                log.record(step, measured, stall)
                if step == last:
                    jax.block_until_ready(self.state)
                    profile.close()
                stops = self.stop.is_due(step) and step < run.steps
                self.run_due_actions(step, batch, log, stops)
                if stops:
                    raise self.stop.make_error(step)
            log.flush()
        return float(measured["loss"])

    def run_due_actions(self, step: int, batch: model.Batch, log: metrics.MetricsLog, stops: bool) -> None:
        """Validates, exports, saves and observes, each if it is due after this step."""
        run, params = self.run, self.state["params"]

        def is_due(every: int) -> bool:
            return every > 0 and (step % every == 0 or step == run.steps)

        evaluate, export = is_due(run.eval_every), is_due(run.export_every)
        save = is_due(run.checkpoint_every) or (stops and run.checkpoint_every > 0)
        observe = policyc.should_observe(step)
        if not (evaluate or export or save or observe or stops):
            return
        log.flush()
        if evaluate:
            log.write({"step": step, **self.evaluate(params)})
        if export:
            self.export(params, self.folder / "exports" / str(step))
        if save:
            self.checkpoints.save(step, self.state, self.source.position)
        if observe:
            policyc.observe(step, self.observed_loss, params, batch)
        log.restart_clock()

    def evaluate(self, params: model.Params) -> dict[str, float]:
        """The mean losses on the validation set."""
        _, batches = self.open_data("validation")
        losses = [self.eval_step(params, batch) for batch in islice(batches, self.run.eval_batches)]
        return {name: float(np.mean([each[name] for each in losses])) for name in losses[0]}

    def export(self, params: model.Params, folder: Path) -> None:
        """Writes safetensors with a tokenizer, and runs `--export-command` on them."""
        run = self.run
        files = weights.export_files(self.config, run.sequence, run.tokenizer)
        weights.save_safetensors(params, self.config, folder, files)
        if run.export_command and jax.process_index() == 0:
            fault = run_command(run.export_command, folder, run.export_timeout)
            if fault and run.on_export_fault == "stop":
                raise ConfigError(f"--export-command {fault}")
            if fault:
                print(f"warning: --export-command {fault}; training continues", file=sys.stderr)


def run_command(command: str, folder: Path, timeout: float) -> str | None:
    """Runs a command on an export. Returns what went wrong."""
    try:
        words = [word.replace("{path}", str(folder)) for word in shlex.split(command)]
        code = subprocess.run(words, check=False, timeout=timeout or None).returncode
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout:g} s (--export-timeout) and was ended"
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}"
    return f"exited with {code}" if code else None


def make_profiler(run: RunConfig, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions that start and stop a profile: of XProf, or a range for `nsys profile -c cudaProfilerApi`."""
    if run.profile != "nsys":
        return partial(jax.profiler.start_trace, str(folder / "profile")), jax.profiler.stop_trace
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with suppress(OSError):
            cuda = ctypes.CDLL(name)
            return cuda.cudaProfilerStart, cuda.cudaProfilerStop
    raise ConfigError("--profile nsys needs CUDA, and there is no libcudart.so: use --profile xplane")


if __name__ == "__main__":
    sys.exit(main())
