"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` lists the options.

A run writes metrics, checkpoints and exports to a folder. It has no code for number formats: `policyc apply` runs it
under a policy. The calls of `policyc` below tell the policy about the run; without a policy they do nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes longer to import than everything before it

if __name__ == "__main__" and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # While modules are imported, Ctrl-C ends the process silently.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import errno
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from policyc.models.llama import preemption

_signals = ExitStack()
if __name__ == "__main__":
    _signals.enter_context(preemption.end_at_signals())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `policyc train` blocks it until here
try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    import policyc
    from policyc.models.llama import (
        artifacts,
        command_line,
        configs,
        metrics,
        model,
        partition,
        train_step,
        weights,
    )
    from policyc.models.llama.checkpoints import (
        CONTENTS,
        Checkpoints,
        Restored,
        check_new,
        lock_folder,
        saved_steps,
    )
    from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig
    from policyc.models.llama.feed import BatchFeed
    from policyc.models.llama.goodput import TimeAccount
    from policyc.models.llama.preemption import Stopped, StopRequest, end_together, watch_signals
    from policyc.models.llama.run_files import check_metrics, copy_metrics
except ModuleNotFoundError as _error:
    if _error.name is None or _error.name.startswith("policyc."):
        raise
    sys.exit(f"error: training needs the package '{_error.name}': pip install 'policyc[train]'")


# What to do about errors of the file system.
RESUME = "the same command resumes from the last checkpoint"
MAKE_ROOM = f"make room: {RESUME}"
CHANGE_FOLDER = "choose another folder with --folder"
STORAGE_ERRORS = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EFBIG: MAKE_ROOM,
    errno.EROFS: CHANGE_FOLDER,
    errno.EACCES: CHANGE_FOLDER,
    errno.EISDIR: CHANGE_FOLDER,
    errno.ENOTDIR: CHANGE_FOLDER,
    errno.EEXIST: CHANGE_FOLDER,
    errno.ENAMETOOLONG: CHANGE_FOLDER,
}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        train(*command_line.parse_args(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno is None:
            raise
        print(f"error: {error}\n{STORAGE_ERRORS.get(error.errno, RESUME)}", file=sys.stderr)
        return 1
    except Stopped as stop:
        print(f"{stop}: {stop.advice}", file=sys.stderr)
        return stop.exit_code
    return 0


def train(name: str, config: ModelConfig, run: RunConfig) -> None:
    """Starts or resumes a run, and trains until its last step or until a signal."""
    account = TimeAccount()
    configs.allow_open_files(configs.OPEN_FILES)
    policyc.use_compile_cache(run.compile_cache)
    if run.distributed:
        join_processes(run)
    with (
        watch_signals(run.distributed, saves=run.checkpoint_every > 0) as stop,
        account.watch_compilation(),
        ExitStack() as stack,
    ):
        with end_together(run.distributed):
            trainer = Trainer(name, config, run, stop, stack)
        folder, step = trainer.folder, trainer.steps_done
        if step >= run.steps:
            print(
                f"{folder} is already at step {step} of {run.steps}: raise --steps, or choose another --folder"
            )
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
            "if JAX does not find the processes, add --coordinator HOST:PORT --processes N --process-id I"
        )
        raise ConfigError(f"--distributed: {error}\n{remedy}") from None


STARVED_SECONDS = 0.02  # a wait for data longer than it usually takes to place a batch on the devices


class Trainer:
    """One run, or several seeds of it. Nothing is written until settings, data, policy and initial weights are checked.

    With several seeds, the state and the batches have a leading axis of seeds, and each seed has its own run folder.
    The seeds share checkpoints, which are in the folder of the first one.
    """

    state: train_step.State
    steps_done: int

    def __init__(
        self, name: str, config: ModelConfig, run: RunConfig, stop: StopRequest, stack: ExitStack
    ) -> None:
        if run.wandb:
            configs.import_library("wandb", "wandb")
        self.name: str = name
        self.config: ModelConfig = config
        self.run: RunConfig = run
        self.stop: StopRequest = stop
        self.mesh: Mesh = partition.make_mesh(config, run)
        policy = policyc.current_policy()
        self.policy: str | None = None if policy is None else policy.sha256
        self.policy_name: str | None = None if policy is None else policy.name
        self.policy_text: str | None = None if policy is None else str(policy)
        out = Path(run.folder or "runs/" + name + (f"-{self.policy[:8]}" if self.policy else ""))
        self.runs: list[RunConfig] = configs.runs_of_seeds(run)
        self.folders: list[Path] = [
            out if run.seeds is None else out / f"seed{one.seed}" for one in self.runs
        ]
        configs.check_encoding(out)
        # The files that seeds share are in the folder of the first one, so that several processes may share `out`.
        self.folder: Path = self.folders[0]
        stop.announce(max(saved_steps(self.folder / "checkpoints"), default=0))
        self.batches: BatchFeed = BatchFeed(config, self.runs, self.mesh, "train")
        stack.callback(self.batches.close)
        if run.eval_every:  # on the same batches for all seeds
            self.validation: BatchFeed = BatchFeed(config, self.runs[:1], self.mesh, "validation")
            stack.callback(self.validation.close)
        self.profiler: artifacts.Profiler = artifacts.make_profiler(run, self.folder)
        self.train_step: Any = train_step.make_train_step(config, run, self.mesh)
        self.eval_step: Any = train_step.make_eval_step(
            config, run, self.mesh, under_policy=self.policy is not None
        )
        self.observed_loss: Any = partial(train_step.mean_loss, config, self.mesh, run.accumulate)
        policyc.set_step(0, total=run.steps)
        abstract_state = train_step.abstract_state(config, run, self.mesh)
        self.train_step.trace(
            abstract_state, partition.abstract_batch(run, self.mesh)
        )  # a bad policy fails here
        self.state, self.steps_done = self.resume(abstract_state, stack)
        if 0 < self.steps_done < run.steps and jax.process_index() == 0:
            source = run.resume_from if self.is_new else self.folder / "checkpoints" / str(self.steps_done)
            print(f"resumed from step {self.steps_done} of {run.steps}: {source}")
        self.is_starved: bool = False
        self.positions: dict[int, list[Any]] = {self.steps_done: self.batches.positions}  # after recent steps
        self.saved_step: int = self.steps_done

    # ---- the start

    def resume(self, abstract_state: train_step.State, stack: ExitStack) -> tuple[train_step.State, int]:
        """The state of the last intact checkpoint, or the initial state; and its step. Opens `self.checkpoints`."""
        run, folder = self.run, self.folder / "checkpoints"
        for other in self.folders[1:]:
            if saved_steps(other / "checkpoints"):
                remedy = "choose another folder with --folder, or name the seeds in the same order"
                raise ConfigError(
                    f"{other} belongs to another run, which has its checkpoints there: {remedy}"
                )
        self.is_new: bool = not saved_steps(folder)
        if self.is_new:
            for each in self.folders:
                check_new(each)
            state = None if run.resume_from else self.make_state()
        for each in self.folders:
            stack.enter_context(lock_folder(each))
        identity = configs.identity(self.config, run, self.policy) | {
            CONTENTS: self.batches.contents,
            configs.POLICY_NAME: self.policy_name,
            configs.POLICY_TEXT: self.policy_text,
            configs.BACKENDS: list(policyc.current_backends()),
            configs.VERSIONS: {"policyc": policyc.__version__, "jax": jax.__version__},
        }
        self.checkpoints: Checkpoints = Checkpoints(folder, run.keep, identity, run.keep_every)
        if self.is_new and state is not None:
            return state, 0
        if self.is_new and run.resume_from:
            restored = self.checkpoints.read_other(Path(run.resume_from), abstract_state, run.accept_changes)
            source = Path(run.resume_from).resolve().parents[1]
            sources = [source] if run.seeds is None else [source.parent / each.name for each in self.folders]
            self.check_metrics(sources, restored, may_lack=True)
            for other, each in zip(sources, self.folders, strict=True) if jax.process_index() == 0 else ():
                copy_metrics(other, each, restored.step)
        else:
            restored = self.checkpoints.restore(abstract_state, run.accept_changes)
            self.check_metrics(self.folders, restored, may_lack=run.accept_changes)
            self.checkpoints.set_damaged_aside()
        if restored.positions is None:
            print(
                "warning: the data has changed since the checkpoint: reading it from the beginning",
                file=sys.stderr,
            )
        else:
            self.batches.restore(restored.positions)
        return restored.state, restored.step

    def check_metrics(self, folders: Sequence[Path], restored: Restored, *, may_lack: bool) -> None:
        """Raises ConfigError if metrics have been lost since a checkpoint was written; a warning if they may lack."""
        for folder, mark in zip(folders, restored.metrics, strict=False) if jax.process_index() == 0 else ():
            try:
                check_metrics(folder, restored.step, mark)
            except ConfigError as error:
                if not may_lack:
                    raise ConfigError(
                        f"{error}\nrestore it, or go on without them with --accept-changes"
                    ) from None
                print(f"warning: {error}", file=sys.stderr)

    def make_state(self) -> train_step.State:
        """The state before the first step, with the weights of `--init-from` if it is given."""
        state = train_step.init_state(self.config, self.run, self.mesh)
        if self.run.init_from:
            params = weights.load_safetensors(Path(self.run.init_from), self.config, self.mesh)
            if self.run.seeds is not None:
                params = jax.tree.map(lambda array: jnp.stack([array] * len(self.runs)), params)
            state["params"] = params
        return state

    def write_descriptions(self) -> None:
        """Writes run.json, and under a policy plan.json, to the folder of each seed."""
        for folder, one in zip(self.folders, self.runs, strict=True):
            policyc.set_output_dir(folder)
            about = metrics.describe_run(self.name, self.config, one, self.batches.contents)
            about |= {"policy_sha256": self.policy, "policy_name": self.policy_name}
            if jax.process_index() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                with configs.name_file(folder / "run.json"):
                    (folder / "run.json").write_text(json.dumps(about, indent=1) + "\n")

    # ---- the loop

    def train(self, account: TimeAccount) -> list[float]:
        """Runs the remaining steps. Returns the last loss of each seed."""
        run = self.run
        first, last = artifacts.steps_to_profile(run, self.steps_done)
        self.write_descriptions()
        with ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            log = metrics.MetricsLog(stack, self.folders, self.config, run, self.steps_done, account)
            profile = stack.enter_context(ExitStack())  # an interrupted run keeps what it recorded
            stack.enter_context(end_together(run.distributed))
            stack.enter_context(self.save_at_faults(log))
            if self.is_new and run.checkpoint_every:
                self.save(self.steps_done, log)  # written while the first step compiles
            account.switch("step")
            for step in range(self.steps_done + 1, run.steps + 1):
                batch, stall = self.next_batch(step, log)
                policyc.set_step(step - 1, total=run.steps)
                if step == first:
                    self.profiler.start()
                    profile.callback(self.profiler.stop)
                annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
                with annotation, log.progress.watch("the step", compiles=step == self.steps_done + 1):
                    self.state, measured = self.train_step(self.state, batch)
                if step == self.steps_done + 1:
                    self.checkpoints.wait()  # before any metrics: they need a checkpoint to resume from
                    self.stop.defer()
                log.record(step, measured, stall)
                if step == last:
                    jax.block_until_ready(self.state)
                    profile.close()
                stops = self.stop.is_due(step) and step < run.steps
                self.run_due_actions(step, batch, log, stops)
                if stops:
                    self.finish(step, log)
                    raise self.stop.make_error(step)
            self.finish(run.steps, log)
            log.raise_errors()
        return [float(loss) for loss in np.atleast_1d(jax.device_get(measured["loss"]))]

    def next_batch(self, step: int, log: metrics.MetricsLog) -> tuple[model.Batch, float]:
        """The batch of a step, and how many seconds the devices waited for it.

        Waiting while the devices compute costs nothing. To measure only the rest of a wait, a run that waited for its
        previous batch first lets the devices finish their step.
        """
        self.positions = {step - 2: self.positions.get(step - 2, []), step - 1: self.batches.positions}
        if self.is_starved:
            log.flush()
        begin = log.account.clock()
        with self.save_if_data_fails(step - 1, log):
            batch = next(self.batches)
        waited = log.account.clock() - begin
        stall = waited if log.is_idle() else 0.0
        log.account.claim("stall", stall)
        self.is_starved = stall > STARVED_SECONDS
        return batch, stall

    def run_due_actions(self, step: int, batch: model.Batch, log: metrics.MetricsLog, stops: bool) -> None:
        """Validates, exports, saves and observes, as far as each is due after this step."""
        run, params, progress = self.run, self.state["params"], log.progress

        def is_due(every: int) -> bool:
            return every > 0 and (step % every == 0 or step == run.steps)

        evaluate, export = is_due(run.eval_every), is_due(run.export_every)
        save = is_due(run.checkpoint_every) or (stops and run.checkpoint_every > 0)
        observe = policyc.should_observe(step)
        if not (evaluate or export or save or observe or stops):
            return
        log.flush()
        if evaluate:
            with self.save_if_data_fails(step, log), progress.during("eval"):
                losses = self.evaluate(params)
            log.write_validation(step, losses)
        if export:
            with progress.during("export"):
                for folder, params_of_seed in self.of_each_seed(params):
                    artifacts.export(params_of_seed, self.config, run, folder / "exports" / str(step))
        if save:
            self.save(step, log)
            log.write_account(step)
        if observe:
            with progress.during("other"):
                for folder, (params_of_seed, rows) in self.of_each_seed((params, batch)):
                    policyc.set_output_dir(folder)
                    policyc.observe(step, self.observed_loss, params_of_seed, rows)
        log.restart_clock()

    def evaluate(self, params: model.Params) -> dict[str, np.ndarray]:
        """The mean losses of each seed on the validation set."""
        losses = [self.eval_step(params, batch) for batch in islice(self.validation, self.run.eval_batches)]
        self.validation.restart()  # every validation reads the same batches
        return train_step.average_losses(jax.device_get(losses))

    def of_each_seed(self, tree: Any) -> Iterator[tuple[Path, Any]]:
        """The folder of each seed, and its part of a tree of stacked arrays."""
        for number, folder in enumerate(self.folders):
            yield folder, tree if self.run.seeds is None else jax.tree.map(itemgetter(number), tree)

    def finish(self, step: int, log: metrics.MetricsLog) -> None:
        """Waits for the metrics and the checkpoint of the last step, and closes the account of this process."""
        log.flush()
        with log.account.during("checkpoint"):
            self.checkpoints.wait()
        log.write_account(step)

    # ---- checkpoints

    def save(self, step: int, log: metrics.MetricsLog) -> None:
        with log.progress.during("checkpoint"):
            self.checkpoints.save(step, self.state, self.batches.positions, log.marks(step))
        self.saved_step = step

    @contextmanager
    def save_if_data_fails(self, step: int, log: metrics.MetricsLog) -> Iterator[None]:
        """Saves the run after a step if its data cannot be read. One of several processes cannot save alone."""
        positions = self.batches.positions
        try:
            yield
        except ConfigError:
            if self.run.checkpoint_every and step != self.saved_step and jax.process_count() == 1:
                log.flush()
                self.checkpoints.save(step, self.state, positions, log.marks(step))
            raise

    @contextmanager
    def save_at_faults(self, log: metrics.MetricsLog) -> Iterator[None]:
        """Saves the state before a faulty step that stops the run. The devices kept it, see `train_step`."""
        try:
            yield
        except metrics.FaultError as fault:
            before = fault.step - 1
            if not self.run.checkpoint_every:
                raise ConfigError(f"{fault}. Nothing was saved (--checkpoint-every 0)") from None
            if self.run.seeds is not None:
                raise ConfigError(f"{fault}\nthe last checkpoint is at step {self.saved_step}") from None
            if before != self.saved_step:
                state = self.state | {"faults": jnp.zeros_like(self.state["faults"])}
                self.checkpoints.save(before, state, self.positions[before], log.marks(before))
                self.checkpoints.wait()
            log.write_account(before)
            raise ConfigError(f"{fault}. The state before it is in the checkpoint of step {before}") from None


if __name__ == "__main__":
    with _signals:
        sys.exit(main())
