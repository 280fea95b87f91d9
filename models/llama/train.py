"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` tells the rest.

In: a configuration. Out: a folder with metrics, checkpoints, exports. Nothing here knows about number formats: run it
under `policyc apply` for that. The one trap: whatever can be known to be wrong must be said before the first step.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import jax
    import numpy as np
    from llama import configs, data, mesh, metrics, model, optimizer, weights
    from llama.checkpoints import Checkpoints
    from llama.configs import BadRun, Model, Run
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("llama"):
        raise
    sys.exit(f"error: training needs the package '{error.name}': pip install 'policyc[train]'")
except KeyboardInterrupt:
    sys.exit(130)


def main(words: Sequence[str] | None = None) -> int:
    try:
        train(*configs.parse(words))
    except BadRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as at:
        print(
            at if at.args else "interrupted: the same command goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 130
    return 0


def train(name: str, c: Model, run: Run) -> None:
    if run.distributed:
        jax.distributed.initialize(run.coordinator, run.processes, run.process_id)
    where = mesh.make(c, run)
    policy = os.environ.get("POLICYC_POLICY_SHA256")
    folder = Path(run.out or "runs/" + name + (f"-{policy[:8]}" if policy else ""))
    feed, profile = Feed(c, run, where), Profile(run, folder)
    described, make = optimizer.first_state(c, run, where)
    step = optimizer.train_step(c, run, where)
    tell("step", 0, total=run.steps)
    step.trace(described, feed.described())  # a policy that does not fit is known before anything is written

    checkpoints = Checkpoints(folder / "checkpoints", run.keep, configs.identity(c, run, policy))
    begin = run.resume_from if run.resume_from is not None else checkpoints.latest()
    if begin is not None:
        state, position = checkpoints.restore(begin, described, run.accept_changes)
        feed.source.restore(position)
    else:
        begin, state = 0, make()
        if run.init_from:
            state["params"] = weights.load(Path(run.init_from), c, where)
    if begin >= run.steps:
        print(f"{folder} is at step {begin} of {run.steps} already: remove it, or give another --out")
        return

    tell("results_in", folder)
    validation = Validation(c, run, where, policy is not None)
    log = metrics.Log(folder, c, run, begin)
    with closing(checkpoints), closing(log), noted_interrupt() as interrupted:
        for done in range(begin + 1, run.steps + 1):
            batch, stall = feed.next()
            tell("step", done - 1, total=run.steps)
            profile.before(done)
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                state, measured = step(state, batch)
            log.later(done, measured, stall)
            profile.after(done, state)
            every = {"eval": run.eval_every, "export": run.export_every, "save": run.checkpoint_every}
            due = {what for what, n in every.items() if n and (done % n == 0 or done == run.steps)}
            if interrupted and run.checkpoint_every:
                due.add("save")
            if tell("observes", done):
                due.add("observe")
            if due or interrupted:
                log.flush()
                if "eval" in due:
                    log.write({"step": done, **validation.losses(state["params"])})
                if "export" in due:
                    export(state["params"], c, folder / "exports" / str(done), run.export_command)
                if "save" in due:
                    checkpoints.save(done, state, feed.source.state())
                if "observe" in due:
                    tell("observe", done, validation.mean, state["params"], batch)
                if interrupted:
                    saved = "its checkpoint is saved" if run.checkpoint_every else "no checkpoint is kept"
                    raise KeyboardInterrupt(f"interrupted after step {done}: {saved}")
                log.restart_clock()
        log.flush()
    if jax.process_index() == 0:
        print(f"loss {log.last['loss']:.4f} after {run.steps} steps; metrics and checkpoints are in {folder}")


def tell(what: str, *about: Any, **more: Any) -> Any:
    """Tells policyc something, where it runs this program: the step, for schedules; where results are; a loss to
    measure. Where no policyc is loaded, nobody listens.
    """
    policyc = sys.modules.get("policyc")
    return None if policyc is None else getattr(policyc, what)(*about, **more)


@contextmanager
def noted_interrupt() -> Iterator[list[int]]:
    """Ctrl-C is noted here, once, for the step to end first. Several processes would end at different steps."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _: Any) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    if jax.process_count() == 1:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class Feed:
    """Batches on the devices. The source reads ahead by itself."""

    def __init__(self, c: Model, run: Run, where: Any, split: str = "train") -> None:
        part, self._parts = mesh.share(where, run.batch)
        self._mesh, self._shape = where, (run.batch, run.sequence)
        self.source = data.Source(
            run.data, batch=run.batch, sequence=run.sequence, vocab=c.vocab, seed=run.seed, split=split,
            process_index=part, process_count=self._parts, tokenizer=run.tokenizer,
        )  # fmt: skip

    def described(self) -> dict[str, jax.ShapeDtypeStruct]:
        place = mesh.sharding(self._mesh, ("batch", "sequence"))
        one = jax.ShapeDtypeStruct(self._shape, "int32", sharding=place)
        return dict.fromkeys(("tokens", "targets", "mask"), one)

    def next(self) -> tuple[Any, float]:
        """A batch, and the seconds that were waited for it."""
        begin = time.perf_counter()
        return mesh.placed(next(self.source), self._mesh, self._parts), time.perf_counter() - begin


class Validation:
    """The loss on a fixed set: as the run computes it and, where a policy is at work, plainly too."""

    def __init__(self, c: Model, run: Run, where: Any, policy: bool) -> None:
        self._c, self._run, self._mesh = c, run, where
        ways = {"validation_loss": True, **({"validation_loss_plain": False} if policy else {})}
        self._ways = {name: optimizer.validation(c, where, under) for name, under in ways.items()}

    def mean(self, params: Any, batch: Any) -> jax.Array:
        """The loss of a batch, or of as much of it as is computed at a time."""
        part = {name: rows[:: self._run.accumulate] for name, rows in batch.items()}
        return model.loss(params, part, self._c, self._mesh)[0] / part["mask"].sum()

    def losses(self, params: Any) -> dict[str, float]:
        feed = Feed(self._c, self._run, self._mesh, "validation")
        batches = [feed.next()[0] for _ in range(self._run.eval_batches)]
        sums = {name: sum(np.array(of(params, b)) for b in batches) for name, of in self._ways.items()}
        return {name: float(nats / max(count, 1)) for name, (nats, count) in sums.items()}


def export(params: Any, c: Model, folder: Path, command: str | None) -> None:
    """Safetensors for other programs, and one of them run on it."""
    weights.save(params, c, folder)
    if command and jax.process_index() == 0:
        ran = subprocess.run([w.replace("{path}", str(folder)) for w in shlex.split(command)], check=False)
        if ran.returncode:
            print(f"warning: --export-command ended with {ran.returncode}; training goes on", file=sys.stderr)


class Profile:
    """A profile of some steps: XProf's, or a range for Nsight Systems to record (`nsys profile -c cudaProfilerApi`)."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._first, self._last = (int(n) if run.profile else 0 for n in run.profile_steps.split(":"))
        self._folder, self._cuda = folder / "profile", None
        if run.profile == "nsys":
            for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
                with suppress(OSError):
                    self._cuda = self._cuda or ctypes.CDLL(name)
            if not self._cuda:
                raise BadRun(
                    "--profile nsys needs CUDA, and libcudart.so is not found: --profile xplane needs nothing"
                )

    def before(self, step: int) -> None:
        if step == self._first:
            self._cuda.cudaProfilerStart() if self._cuda else jax.profiler.start_trace(str(self._folder))

    def after(self, step: int, state: Any) -> None:
        if step == self._last:
            jax.block_until_ready(state)
            self._cuda.cudaProfilerStop() if self._cuda else jax.profiler.stop_trace()


if __name__ == "__main__":
    sys.exit(main())
