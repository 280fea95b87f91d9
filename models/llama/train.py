"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` tells the rest.

In: a configuration. Out: a folder with metrics, checkpoints, exports. Nothing here knows about number formats: run it
under `policyc apply` for that. The one trap: whatever can be known to be wrong must be said before the first step.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import jax
    from llama import configs, data, mesh, metrics, model, optimizer, weights
    from llama.checkpoints import Checkpoints
    from llama.configs import BadRun, Model, Run
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("llama"):
        raise
    sys.exit(f"error: training needs the package '{error.name}': pip install 'policyc[train]'")


def main(words: Sequence[str] | None = None) -> int:
    try:
        name, c, run = configs.parse(words)
        train(name, c, run)
    except (BadRun, data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def train(name: str, c: Model, run: Run) -> None:
    if run.distributed:
        jax.distributed.initialize(run.coordinator, run.processes, run.process_id)
    where = mesh.make(c, run)
    policy = os.environ.get("POLICYC_POLICY_SHA256")
    folder = Path(run.out or "runs/" + name + (f"-{policy[:8]}" if policy else ""))
    feed = Feed(c, run, where)
    described, make = optimizer.first_state(c, run, where)
    step = optimizer.train_step(c, run, where)
    tell("step", 0, total=run.steps)
    step.trace(
        described, feed.described()
    )  # so that a policy that does not fit is known before anything is written

    checkpoints = Checkpoints(folder / "checkpoints", run.keep, configs.identity(c, run, policy))
    begin = run.resume_from if run.resume_from is not None else checkpoints.latest()
    if begin is not None:
        state, position = checkpoints.restore(begin, described, run.accept_changes)
        checkpoints.forget_after(begin)
        feed.source.restore(position)
    else:
        begin, state = 0, make()
        if run.init_from:
            state["params"] = weights.load(Path(run.init_from), c, where)
    if begin >= run.steps:
        print(f"{folder} is at step {begin} of {run.steps} already: remove it, or give another --out")
        return

    tell("results_in", folder)
    log = metrics.Log(folder, c, run, begin)
    profile = Profile(run, folder)
    evaluations = Validation(c, run, where, policy is not None)
    try:
        for at in range(begin, run.steps):
            batch, stall = feed.next()
            tell("step", at, total=run.steps)
            profile.before(at + 1)
            with jax.profiler.StepTraceAnnotation("train", step_num=at + 1):
                state, measured = step(state, batch)
            log.later(at + 1, measured, stall)
            profile.after(at + 1, state)
            done = at + 1
            due = [every and (done % every == 0 or done == run.steps)
                   for every in (run.eval_every, run.export_every, run.checkpoint_every)]  # fmt: skip
            due.append(tell("observes", done))
            if any(due):
                log.flush()
                if due[0]:
                    log.write({"step": done, **evaluations.losses(state["params"])})
                if due[1]:
                    export(state["params"], c, folder / "exports" / str(done), run.export_command)
                if due[2]:
                    checkpoints.save(done, state, feed.source.state())
                if due[3]:
                    tell("observe", done, evaluations.mean, state["params"], batch)
                log.restart_clock()
        log.flush()
    finally:
        log.close()
        checkpoints.close()
    if jax.process_index() == 0:
        print(f"loss {log.last['loss']:.4f} after {run.steps} steps; metrics and checkpoints are in {folder}")


def tell(what: str, *about: Any, **more: Any) -> Any:
    """Tells policyc something, where it runs this program: the step, for schedules; where results are; a loss to
    measure. Where no policyc is loaded, nobody listens.
    """
    policyc = sys.modules.get("policyc")
    return None if policyc is None else getattr(policyc, what)(*about, **more)


class Feed:
    """Batches on the devices. The source reads ahead by itself."""

    def __init__(self, c: Model, run: Run, where: Any, split: str = "train") -> None:
        self._mesh, self._shape = where, (run.batch, run.sequence)
        self._part, self._parts = mesh.share(where, run.batch)
        self.source = data.open_source(
            run.data, batch=run.batch, sequence=run.sequence, vocab=c.vocab, seed=run.seed, split=split,
            process_index=self._part, process_count=self._parts, tokenizer=run.tokenizer,
        )  # fmt: skip

    def described(self) -> dict[str, jax.ShapeDtypeStruct]:
        place = mesh.sharding(self._mesh, ("batch", "sequence"))
        return {
            n: jax.ShapeDtypeStruct(self._shape, "int32", sharding=place)
            for n in ("tokens", "targets", "mask")
        }

    def next(self) -> tuple[Any, float]:
        """A batch, and the seconds that were waited for it."""
        begin = time.perf_counter()
        local = next(self.source)
        return mesh.placed(local, self._mesh, self._part, self._parts), time.perf_counter() - begin


class Validation:
    """The loss on a fixed set: as the run computes it and, where a policy is at work, plainly too."""

    def __init__(self, c: Model, run: Run, where: Any, policy: bool) -> None:
        self._c, self._run, self._mesh = c, run, where
        plain = {"validation_loss_plain": optimizer.validation(c, where, False)} if policy else {}
        self._losses = {"validation_loss": optimizer.validation(c, where, True), **plain}

    def mean(self, params: Any, batch: Any) -> jax.Array:
        """The loss of a batch, or of as much of it as is computed at a time."""
        part = {name: rows[:: self._run.accumulate] for name, rows in batch.items()}
        return model.loss(params, part, self._c, self._mesh)[0] / part["mask"].sum()

    def losses(self, params: Any) -> dict[str, float]:
        totals = {name: [0.0, 0.0] for name in self._losses}
        feed = Feed(self._c, self._run, self._mesh, "validation")
        for _ in range(self._run.eval_batches):
            batch, _ = feed.next()
            for name, evaluate in self._losses.items():
                nats, count = evaluate(params, batch)
                totals[name][0] += float(nats)
                totals[name][1] += float(count)
        return {name: nats / max(count, 1.0) for name, (nats, count) in totals.items()}


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
        first, last = (int(n) for n in run.profile_steps.split(":"))
        self._first, self._last, self._kind, self._folder = first, last, run.profile, folder / "profile"
        if self._kind == "nsys":
            library = ctypes.util.find_library("cudart") or "libcudart.so"
            try:
                self._cuda = ctypes.CDLL(library)
            except OSError:
                raise BadRun(
                    "--profile nsys needs CUDA's runtime library, and libcudart.so is not found"
                ) from None

    def before(self, step: int) -> None:
        if step == self._first and self._kind == "xplane":
            jax.profiler.start_trace(str(self._folder))
        elif step == self._first and self._kind == "nsys":
            self._cuda.cudaProfilerStart()

    def after(self, step: int, state: Any) -> None:
        if self._kind is None or step != self._last:
            return
        jax.block_until_ready(state)
        if self._kind == "xplane":
            jax.profiler.stop_trace()
            print(f"profile: {self._folder}")
        else:
            self._cuda.cudaProfilerStop()


if __name__ == "__main__":
    sys.exit(main())
