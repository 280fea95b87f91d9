"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` lists the options.

A run writes metrics, checkpoints and exports to a folder. It has no code for number formats: `policyc apply` runs it
under a policy. The calls of `policyc` below tell the policy about the run; without a policy they do nothing.
"""

import ctypes
import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

try:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import policyc
    from policyc.models.llama import command_line, configs, data, metrics, model, optimizer, weights
    from policyc.models.llama.checkpoints import CONTENTS, Checkpoints, lock_folder, saved_steps
    from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig
    from policyc.models.llama.goodput import TimeAccount
    from policyc.models.llama.preemption import INTERRUPTED, Stopped, StopRequest, end_together, watch_signals
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("policyc."):
        raise
    sys.exit(f"error: training needs the package '{error.name}': pip install 'policyc[train]'")
except KeyboardInterrupt:
    sys.exit(130)


# Errors of writing that are no fault of the program, and what to do about them.
MAKE_ROOM = "make room: the same command resumes from the last checkpoint"
CHANGE_FOLDER = "choose another folder with --out"
STORAGE_ERRORS = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EFBIG: MAKE_ROOM,
    errno.EROFS: CHANGE_FOLDER,
    errno.EACCES: CHANGE_FOLDER,
    errno.EISDIR: CHANGE_FOLDER,
    errno.ENOTDIR: CHANGE_FOLDER,
}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        train(*command_line.parse_args(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        print(f"error: writing failed: {error}\n{STORAGE_ERRORS[error.errno]}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt) as error:
        stop = error if isinstance(error, Stopped) else Stopped("interrupted", INTERRUPTED)
        print(f"{stop}: {stop.advice}", file=sys.stderr)
        return stop.exit_code
    return 0


def train(name: str, config: ModelConfig, run: RunConfig) -> None:
    account = TimeAccount()
    if run.distributed:
        join_processes(run)
    with watch_signals(run.distributed) as stop, account.watch_compilation(), ExitStack() as stack:
        with end_together(run.distributed):
            trainer = Trainer(name, config, run, stop, stack)
        folder, step = trainer.folder, trainer.steps_done
        if step >= run.steps:
            print(f"{folder} is already at step {step} of {run.steps}: remove it, or choose another --out")
            return
        losses = trainer.train(account)
    if jax.process_index() == 0:
        text = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"loss {text} after {run.steps} steps; metrics and checkpoints are in {folder}")
        print(account)


def join_processes(run: RunConfig) -> None:
    """Starts jax.distributed."""
    initialize: Any = jax.distributed.initialize
    try:
        initialize(run.coordinator, run.processes, run.process_id, heartbeat_timeout_seconds=run.heartbeat)
    except (ValueError, RuntimeError) as error:
        remedy = (
            "where JAX does not find the processes, add --coordinator HOST:PORT --processes N --process-id I"
        )
        raise ConfigError(f"--distributed: {error}\n{remedy}") from None


STARVED_SECONDS = 0.02  # a wait for data above the usual cost of placing a batch on the devices


class Trainer:
    """One run, or several seeds of it. Nothing is written until settings, data, policy and initial weights are good.

    With several seeds, the state and the batches have a leading axis of seeds, and each seed has a folder of a run.
    Their checkpoints are common, in the folder of the first one.
    """

    def __init__(
        self, name: str, config: ModelConfig, run: RunConfig, stop: StopRequest, stack: ExitStack
    ) -> None:
        if run.wandb:
            configs.import_library("wandb", "wandb")
        self.config, self.run, self.mesh, self.stop = config, run, model.make_mesh(config, run), stop
        self.policy = os.environ.get("POLICYC_POLICY_SHA256")
        self.policy_name = os.environ.get("POLICYC_POLICY_NAME")
        out = Path(run.out or "runs/" + name + (f"-{self.policy[:8]}" if self.policy else ""))
        self.name, self.runs = name, configs.runs_of_seeds(run)
        self.folders = [out if run.seeds is None else out / f"seed{one.seed}" for one in self.runs]
        # What seeds have in common is in the folder of the first one, so that several processes may share `out`.
        self.folder = self.folders[0]
        stop.announce(max(saved_steps(self.folder / "checkpoints"), default=0))
        self.sources, self.batches = self.open_data("train")
        if run.eval_every:
            (self.validation,), self.validation_batches = self.open_data("validation")
            stack.callback(self.validation.close)
        for source in self.sources:
            stack.callback(source.close)
        self.is_starved = False
        self.start_profile, self.stop_profile = make_profiler(run, self.folder)
        self.train_step = optimizer.make_train_step(config, run, self.mesh)
        self.eval_step = optimizer.make_eval_step(
            config, run, self.mesh, under_policy=self.policy is not None
        )
        self.observed_loss = partial(optimizer.mean_loss, config, self.mesh, run.accumulate)
        abstract_state = optimizer.abstract_state(config, run, self.mesh)
        policyc.set_step(0, total=run.steps)
        self.train_step.trace(abstract_state, model.abstract_batch(run, self.mesh))  # a bad policy fails here
        self.state, self.steps_done, self.checkpoints = self.resume(abstract_state, stack)
        self.saved_step = self.steps_done

    def open_data(self, split: str) -> tuple[list[data.BatchSource], Iterator[model.Batch]]:
        """The source of batches of each seed, and their batches on the devices. Seeds have one validation set."""
        shape = (self.run.batch, self.run.sequence)
        sharding = model.sharding(self.mesh, ("batch", "sequence"))
        indices: Any = sharding.addressable_devices_indices_map(shape).values()
        rows = sorted({row for index in indices for row in range(self.run.batch)[index[0]]})
        runs = self.runs if split == "train" else self.runs[:1]
        sources = [data.BatchSource(run, self.config.vocab, rows, split) for run in runs]
        if self.run.seeds is None or split != "train":
            make_global: Any = jax.make_array_from_process_local_data
            return sources, (make_global(sharding, batch, shape) for batch in sources[0])
        return sources, map(self.stack_batches, *sources)

    def stack_batches(self, *batches: dict[str, np.ndarray]) -> model.Batch:
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        return cast(model.Batch, jax.device_put(stacked, model.sharding(self.mesh, ())))

    def resume(
        self, abstract_state: optimizer.State, stack: ExitStack
    ) -> tuple[optimizer.State, int, Checkpoints]:
        """The state of the last whole checkpoint, or the initial state."""
        config, run, folder = self.config, self.run, self.folder / "checkpoints"
        for other in self.folders[1:]:
            if saved_steps(other / "checkpoints"):
                remedy = "choose another folder with --out, or name the seeds in the same order"
                raise ConfigError(f"{other} is of another run, which has its checkpoints there: {remedy}")
        is_new = not saved_steps(folder)
        if is_new:
            state = optimizer.init_state(config, run, self.mesh)
            if run.init_from:
                params = weights.load_safetensors(Path(run.init_from), config, self.mesh)
                if run.seeds is not None:
                    params = jax.tree.map(lambda array: jnp.stack([array] * len(self.runs)), params)
                state["params"] = params
        for each in self.folders:
            stack.enter_context(lock_folder(each))
        identity = configs.identity(config, run, self.policy) | {
            CONTENTS: self.sources[0].contents,
            configs.POLICY_NAME: self.policy_name,
        }
        checkpoints = Checkpoints(folder, run.keep, identity)
        if is_new:
            return state, 0, checkpoints
        state, position, step = checkpoints.restore(abstract_state, run.accept_changes)
        if position is None:
            print(
                "warning: the data is another one than before: it is read from its beginning", file=sys.stderr
            )
            return state, step, checkpoints
        # Earlier versions stored one number for all seeds.
        positions = position if isinstance(position, list) else [position] * len(self.sources)
        for source, one in zip(self.sources, positions, strict=True):
            source.restore(one)
        return state, step, checkpoints

    @contextmanager
    def save_if_data_fails(self, step: int, log: metrics.MetricsLog) -> Iterator[None]:
        """Saves the run after a step if its data cannot be read. One of several processes cannot save alone."""
        positions = self.positions()
        try:
            yield
        except ConfigError:
            if self.run.checkpoint_every and step != self.saved_step and jax.process_count() == 1:
                log.flush()
                self.checkpoints.save(step, self.state, positions)
            raise

    def positions(self) -> list[Any]:
        """Where the next batch of each seed begins in the data."""
        return [source.state for source in self.sources]

    def of_each_seed(self, tree: Any) -> Iterator[tuple[Path, Any]]:
        """The folder of each seed, and its part of a tree of stacked arrays."""
        for number, folder in enumerate(self.folders):
            yield folder, tree if self.run.seeds is None else jax.tree.map(itemgetter(number), tree)

    def write_descriptions(self) -> None:
        """Writes run.json, and under a policy plan.json, to the folder of each seed."""
        for folder, one in zip(self.folders, self.runs, strict=True):
            policyc.set_output_dir(folder)
            about = metrics.describe_run(self.name, self.config, one, self.sources[0].contents)
            about |= {"policy_sha256": self.policy, "policy_name": self.policy_name}
            if jax.process_index() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "run.json").write_text(json.dumps(about, indent=1) + "\n")

    def train(self, account: TimeAccount) -> list[float]:
        """Runs the remaining steps. Returns the last loss of each seed."""
        run = self.run
        first, last = self.steps_to_profile()
        self.write_descriptions()
        with ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            log = metrics.MetricsLog(stack, self.folders, self.config, run, self.steps_done, account)
            profile = stack.enter_context(ExitStack())  # an interrupted run keeps what it recorded
            stack.enter_context(end_together(run.distributed))
            self.stop.defer()
            account.switch("step")
            for step in range(self.steps_done + 1, run.steps + 1):
                with self.save_if_data_fails(step - 1, log):
                    batch, stall = self.next_batch(log)
                policyc.set_step(step - 1, total=run.steps)
                if step == first:
                    self.start_profile()
                    profile.callback(self.stop_profile)
                annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
                with annotation, log.progress.watch_step(is_first=step == self.steps_done + 1):
                    self.state, measured = self.train_step(self.state, batch)
                log.record(step, measured, stall)
                if step == last:
                    jax.block_until_ready(self.state)
                    profile.close()
                stops = self.stop.is_due(step) and step < run.steps
                self.run_due_actions(step, batch, log, stops)
                if stops:
                    self.finish(step, log)
                    raise self.stop.make_error(step, is_saved=run.checkpoint_every > 0)
            self.finish(run.steps, log)
            log.raise_errors()
        return [float(loss) for loss in np.atleast_1d(jax.device_get(measured["loss"]))]

    def steps_to_profile(self) -> tuple[int, int]:
        """The first and last step to record, of those that are left; two zeros if there are none."""
        if not self.run.profile:
            return 0, 0
        first, last = map(int, self.run.profile_steps.split(":"))
        if last <= self.steps_done:
            about = (
                f"--profile-steps {self.run.profile_steps}: the run continues after step {self.steps_done}"
            )
            print(f"warning: {about}, so nothing is recorded now", file=sys.stderr)
            return 0, 0
        return max(first, self.steps_done + 1), last

    def next_batch(self, log: metrics.MetricsLog) -> tuple[model.Batch, float]:
        """The next batch, and for how many seconds the devices waited for it.

        A wait while the devices compute costs nothing. To tell how much of a wait is longer than that, a run that
        waited before first lets the devices finish their step.
        """
        if self.is_starved:
            log.flush()
        begin = log.account.clock()
        batch = next(self.batches)
        waited = log.account.clock() - begin
        stall = waited if log.is_idle() else 0.0
        log.account.move("stall", stall)
        self.is_starved = stall > STARVED_SECONDS
        return batch, stall

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
            with self.save_if_data_fails(step, log), log.account.during("eval"):
                losses = self.evaluate(params)
            log.write_validation(step, losses)
        if export:
            with log.account.during("export"):
                for folder, params_of_seed in self.of_each_seed(params):
                    self.export(params_of_seed, folder / "exports" / str(step))
        if save:
            with log.account.during("checkpoint"):
                self.checkpoints.save(step, self.state, self.positions())
            self.saved_step = step
            log.write_account(step)
        if observe:
            with log.account.during("other"):
                for folder, (params_of_seed, rows) in self.of_each_seed((params, batch)):
                    policyc.set_output_dir(folder)
                    policyc.observe(step, self.observed_loss, params_of_seed, rows)
        log.restart_clock()

    def finish(self, step: int, log: metrics.MetricsLog) -> None:
        """Waits for the metrics and the checkpoint of the last step, and closes the account of this process."""
        log.flush()
        with log.account.during("checkpoint"):
            self.checkpoints.wait()
        log.write_account(step)

    def evaluate(self, params: model.Params) -> dict[str, np.ndarray]:
        """The mean losses on the validation set, of each seed."""
        batches = islice(self.validation_batches, self.run.eval_batches)
        losses = [self.eval_step(params, batch) for batch in batches]
        self.validation.restore(self.validation.start)  # every validation reads the same batches
        return optimizer.average_losses(jax.device_get(losses))

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
