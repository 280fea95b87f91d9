"""Pretrains a Llama: `python models/llama/train.py --config tiny`. `--help` tells the rest.

In: a configuration. Out: a folder with metrics, checkpoints, exports. Nothing here knows about number formats: run it
under `policyc apply` for that. The one trap: whatever can be known to be wrong must be said before the first step.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import jax
    import numpy as np
    from llama import configs, data, metrics, model, optimizer
    from llama.configs import BadRun, Model, Run
    from llama.storage import Checkpoints, latest, load, save
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
    except KeyboardInterrupt as end:
        said = str(end) or "interrupted"
        print(f"{said}: the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def train(name: str, c: Model, run: Run) -> None:
    if run.distributed:
        jax.distributed.initialize(run.coordinator, run.processes, run.process_id)
    where = model.make_mesh(c, run)
    policy = os.environ.get("POLICYC_POLICY_SHA256")
    folder = Path(run.out or "runs/" + name + (f"-{policy[:8]}" if policy else ""))
    source, feed = batches(c, run, where)
    start, stop = profiler(run, folder)
    first, last = map(int, run.profile_steps.split(":")) if run.profile else (0, 0)
    state, make = optimizer.first_state(c, run, where)
    step = optimizer.train_step(c, run, where)
    tell("set_step", 0, total=run.steps)
    # So that a policy that does not fit is known before anything is written; and weights that do not, below.
    step.trace(state, model.described_batch(run, where))

    found = latest(folder / "checkpoints")
    if found is None:
        state = make()
        if run.init_from:
            state["params"] = load(Path(run.init_from), c, where)
    identity = configs.identity(c, run, policy) | {"contents_of_the_data": source.contents}
    checkpoints = Checkpoints(folder / "checkpoints", run.keep, identity)
    if found is not None:
        state, position = checkpoints.restore(found, state, run.accept_changes)
        source.seek(position)
    begin = found or 0
    if begin >= run.steps:
        print(f"{folder} is at step {begin} of {run.steps} already: remove it, or give another --out")
        return

    tell("set_output_dir", folder)
    mean = partial(optimizer.mean_loss, c, where, run.accumulate)
    evaluate = optimizer.validation(c, where, plain=policy is not None)
    interrupted: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        """The first time, the step at hand may end."""
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with ExitStack() as stack:
        stack.callback(checkpoints.close)
        log = metrics.Log(stack, folder, c, run, begin)
        profile = stack.enter_context(ExitStack())  # a run that is cut off keeps what was recorded
        # Several processes would end at different steps; and where an interrupt means something else, it goes on to.
        if jax.process_count() == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, interrupt))
        for done in range(begin + 1, run.steps + 1):
            asked = time.perf_counter()
            batch, stall = next(feed), time.perf_counter() - asked
            tell("set_step", done - 1, total=run.steps)
            if done == first:
                start()
                profile.callback(stop)
            with jax.profiler.StepTraceAnnotation("train", step_num=done):
                state, measured = step(state, batch)
            log.later(done, measured, stall)
            if done == last:
                jax.block_until_ready(state)
                profile.close()
            every = {"eval": run.eval_every, "export": run.export_every, "save": run.checkpoint_every}
            due = [what for what, n in every.items() if n and (done % n == 0 or done == run.steps)]
            observed = tell("should_observe", done)
            if not (due or observed or interrupted):
                continue
            log.later()
            if "eval" in due:
                log.write({"step": done, **validation(evaluate, state["params"], c, run, where)})
            if "export" in due:
                export(state["params"], c, folder / "exports" / str(done), run.export_command)
            if "save" in due or (interrupted and run.checkpoint_every):
                checkpoints.save(done, state, source.position)
            if observed:
                tell("observe", done, mean, state["params"], batch)
            if interrupted:
                raise KeyboardInterrupt(f"interrupted after step {done}")
            log.clock = time.perf_counter()  # all this is nobody's step time
        log.later()
    if jax.process_index() == 0:
        loss = float(measured["loss"])
        print(f"loss {loss:.4f} after {run.steps} steps; metrics and checkpoints are in {folder}")


def tell(what: str, *about: Any, **more: Any) -> Any:
    """Tells policyc, where it runs this program: the step, for schedules; where results are; a loss to measure."""
    policyc = sys.modules.get("policyc")
    return None if policyc is None else getattr(policyc, what)(*about, **more)


def batches(c: Model, run: Run, where: Any, split: str = "train") -> tuple[data.Source, Iterator[Any]]:
    """The data, and its batches on the devices."""
    shape, place = (run.batch, run.sequence), model.sharding(where, ("batch", "sequence"))
    held = place.addressable_devices_indices_map(shape).values()
    rows = sorted({row for index in held for row in range(run.batch)[index[0]]})
    source = data.Source(run, c.vocab, rows, split)
    return source, (jax.make_array_from_process_local_data(place, read, shape) for read in source)


def validation(evaluate: Callable[..., Any], params: Any, c: Model, run: Run, where: Any) -> dict[str, float]:
    """The losses on a fixed set."""
    _, feed = batches(c, run, where, "validation")
    each = [evaluate(params, batch) for batch in islice(feed, run.eval_batches)]
    return {name: float(np.mean([losses[name] for losses in each])) for name in each[0]}


def export(params: Any, c: Model, folder: Path, command: str | None) -> None:
    """Safetensors for other programs, and one of them run on it."""
    save(params, c, folder)
    if command and jax.process_index() == 0:
        ran = subprocess.run([w.replace("{path}", str(folder)) for w in shlex.split(command)], check=False)
        if ran.returncode:
            print(f"warning: --export-command ended with {ran.returncode}; training goes on", file=sys.stderr)


def profiler(run: Run, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What begins and what ends a profile: XProf's, or a range for `nsys profile -c cudaProfilerApi`."""
    if run.profile != "nsys":
        return partial(jax.profiler.start_trace, str(folder / "profile")), jax.profiler.stop_trace
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with suppress(OSError):
            cuda = ctypes.CDLL(name)
            return cuda.cudaProfilerStart, cuda.cudaProfilerStop
    raise BadRun("--profile nsys needs CUDA, and no libcudart.so is found; --profile xplane does not need it")


if __name__ == "__main__":
    sys.exit(main())
