"""Options that several commands share, and the parsing of a command line that ends with a program.

Import slow modules inside functions: every `--help` loads this module.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, dataclass_transform

import click

from policyc.cli.common import ExampleCommand
from policyc.numerics import backends

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.hardware.llama_step import Sizes
    from policyc.hardware.mesh import MeshShape
    from policyc.hardware.training_step import TrainingStep

Decorator: TypeAlias = Callable[[Any], Any]
T = TypeVar("T")


class FiniteRange(click.FloatRange):
    """A range of finite numbers. click's own ranges accept NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class ProgramCommand(ExampleCommand):
    """A command whose last words are a program and the program's arguments.

    Options of the command may stand before or after the policy, but before the program. Everything after the
    program's name belongs to the program, even a word that looks like an option of the command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, words = self._split(ctx, args)
        return super().parse_args(ctx, [*options, "--", *words])

    def is_argument(self, word: str, position: int) -> bool:
        """Whether a word is an argument of the command. The program starts with the first word that is not."""
        del word
        return position < sum(isinstance(p, click.Argument) and p.nargs == 1 for p in self.params)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Splits a command line into the options of the command, and its arguments followed by the program."""
        takes_value = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in option.opts
        }
        options: list[str] = []
        arguments: list[str] = []
        rest = deque(args)
        while rest:
            name, equals, _ = rest[0].partition("=")
            if rest[0] == "--":
                rest.popleft()
                break
            if name in takes_value or name.startswith("--"):  # click reports the unknown ones
                options.append(rest.popleft())
                if takes_value.get(name) and not equals:
                    if not rest and ctx.resilient_parsing:  # the shell completes the value
                        break
                    if not rest:
                        raise click.BadOptionUsage(name, f"Option '{name}' requires an argument.", ctx)
                    options.append(rest.popleft())
            elif self.is_argument(rest[0], len(arguments)):
                arguments.append(rest.popleft())
            else:
                break
        return options, [*arguments, *rest]


class Option:
    """An option, as a field of an option class or as a decorator of a command.

    Takes the arguments of `click.option`. As a field, its flag is the name of the field unless one is given. Help shows
    the default, if there is one.
    """

    def __init__(self, *flags: str, **settings: Any) -> None:
        self._flags = flags
        self._settings = settings
        if settings.get("default") is not None:
            settings.setdefault("show_default", True)

    def __call__(self, command: Any) -> Any:
        return click.option(*self._flags, **self._settings)(command)

    def add_to(self, command: Any, name: str) -> Any:
        """Adds the option to a command, which receives its value as the argument `name`."""
        flags = [flag for flag in self._flags if flag.startswith("-")] or [f"--{name.replace('_', '-')}"]
        return click.option(*flags, name, **self._settings)(command)

    @property
    def value_if_absent(self) -> Any:
        without_default = (
            () if self._settings.get("multiple") else False if self._settings.get("is_flag") else None
        )
        return self._settings.get("default", without_default)


def option(*flags: str, **settings: Any) -> Any:
    """Makes an `Option`. The return type `Any` lets it be the default of a field of any type."""
    return Option(*flags, **settings)


def switch(help: str, *flags: str) -> Any:
    """An option without a value."""
    return option(*flags, is_flag=True, help=help)


def number(help: str, *flags: str, least: int = 1, most: int | None = None, **settings: Any) -> Any:
    """An option whose value is a whole number."""
    return option(*flags, type=click.IntRange(least, most), metavar="N", help=help, **settings)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option_class(kind: type[T]) -> type[T]:
    """Turns a class whose fields are options into a dataclass. A field without an option must have a default."""
    for name, value in list(vars(kind).items()):
        if isinstance(value, Option):
            setattr(kind, name, field(default=value.value_if_absent, metadata={"option": value}))
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


def collect_options(kind: type, name: str) -> Decorator:
    """Adds the options of a class to a command, and passes their values as one object, in the argument `name`."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            values = {field.name: kwargs.pop(field.name) for field in fields(kind) if field.name in kwargs}
            return function(*args, **kwargs, **{name: kind(**values)})

        for one in reversed(fields(kind)):
            if "option" in one.metadata:
                call = one.metadata["option"].add_to(call, one.name)
        return call

    return decorate


# ---- single options


def path_option(*flags: str, **settings: Any) -> Any:
    """A path, made absolute because a program may change the working directory. `-` is standard output."""

    return option(*flags, callback=lambda _ctx, _option, path: _make_absolute(path), **settings)


def _make_absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path and path != "-" else path


_BACKENDS = f"{', '.join(backends.NAMES[:-1])} or {backends.NAMES[-1]}"

backend_option: Any = option(
    "--backend",
    default="auto",
    metavar="NAME",
    help=f"Backend for quantized GEMMs: {_BACKENDS}. 'auto' picks one for the devices and the installed libraries.",
)


def priced_backend(**settings: Any) -> Any:
    """`--backend` of a prediction."""
    help = (
        f"Backend whose speed is predicted: {_BACKENDS}. It need not be installed. 'te', Transformer Engine, "
        "leaves to 'xla' what it cannot run; 'auto' is what 'apply' would choose with the libraries installed here."
    )
    return option("--backend", metavar="NAME", help=help, **settings)


def curve_option(**settings: Any) -> Any:
    """`--curve` of a time to loss."""
    help = (
        "What a gap in nats costs in tokens: by the folders of runs of one policy that differ in length, by one run, "
        "or by Chinchilla's law at a number of tokens (chinchilla:15T)."
    )
    return option(metavar="RUN,...|LAW", help=help, **settings)


priced_backend_option: Any = priced_backend(default=backends.PRICED)

require_native_option: Any = switch("Fail if a product would be emulated.")


_FORMATS = {
    ".html": "html",
    ".md": "markdown",
    ".json": "json",
    ".svg": "svg",
    ".policy": "policy",
}
"""The formats that the ending of a file's name asks for."""


def format_of_file(path: str | None, formats: Sequence[str]) -> str | None:
    """The format that the name of an output asks for; None if none. Raises a usage error if it is not in `formats`."""
    format = _FORMATS.get(os.path.splitext(path or "")[1])
    if format is not None and format not in formats:
        endings = [ending for ending, each in _FORMATS.items() if each in formats]
        known = f": this output can be {' or '.join(endings)}" if endings else ""
        raise click.UsageError(f"--out: '{os.path.basename(path or '')}' names another format{known}")
    return format


def format_option(*formats: str, help: str = "Output format.", has_out: bool = True) -> Any:
    """`--format`, passed as `output_format`. The ending of `--out` sets the default, or else it is the first format."""

    def choose(ctx: click.Context, _option: click.Parameter, format: str | None) -> str:
        # click processes the given options before the absent ones, so `out` is known here if `--format` is absent.
        return format or format_of_file(ctx.params.get("out"), formats) or formats[0]

    return option(
        "--format",
        "output_format",
        type=click.Choice(formats),
        callback=choose,
        show_default=f"{'from the ending of --out; otherwise ' if has_out else ''}{formats[0]}",
        help=help,
    )


def out_option(
    help: str = "Write to this file instead of standard output.", formats: Sequence[str] = ()
) -> Any:
    """`--out`, passed as `out`. `formats` are those of an output without `--format`."""

    def check(_ctx: click.Context, _option: click.Parameter, path: str | None) -> str | None:
        if formats:
            format_of_file(path, formats)
        return _make_absolute(path)

    type = click.Path(dir_okay=False, allow_dash=True)
    return option("--out", metavar="FILE", type=type, help=help, callback=check)


def policy_argument(*, required: bool = True) -> Decorator:
    """The policy that a command works on."""
    metavar = "POLICY[:VARIANT]" if required else "[POLICY[:VARIANT]]"
    return click.argument("policy", required=required, metavar=metavar)


vs_option: Any = option(
    metavar="POLICY[:VARIANT]", help="Compare with this policy, and show the change from it."
)

config_option: Any = option(
    "--config", metavar="NAME", help="Configuration of the bundled Llama, instead of a program."
)

DEFAULT_TARGET = "gb200"
"""The default GPU of every command that judges speed."""


def program_argument(*, required: bool) -> Decorator:
    """The words of a program. Goes with `ProgramCommand`."""
    words = "SCRIPT|-m MODULE|-c CODE|- [ARGS]..."
    metavar = words if required else f"[{words}]"
    return click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar=metavar)


# ---- a run of a program under a policy


@option_class
class RunOptions:
    """How a program runs under a policy. The last three fields are options of some commands only."""

    backend: str = backend_option
    require_native: bool = require_native_option
    plan_out: str | None = path_option(
        metavar="FILE", type=click.Path(dir_okay=False), help="Write the plan to this file, as JSON."
    )
    stats_every: int = number(
        "Measure the error of quantization every N steps, for the run's report. 0: never.", least=0, default=0
    )
    rounding_seed: int | None = number(
        "Seed of stochastic rounding.", least=0, most=2**32 - 1, show_default="the policy's"
    )
    quiet: bool = switch("Print nothing but the program's output, warnings and errors.")
    multiple_losses: bool = False
    compile_cache: str | None = None
    telemetry: str | None = None


run_options: Decorator = collect_options(RunOptions, "run")

multiple_losses_option: Any = switch(
    "Let any loss of the program meet an 'expect', not only the first one.", "--multiple-losses"
)

telemetry_option: Any = option(
    "--telemetry",
    metavar="DIR|wandb",
    callback=lambda _ctx, _option, value: value if value == "wandb" else _make_absolute(value),
    help="Report the error of quantization of each operand while the program runs, unmodified: to this folder "
    "(stats.jsonl, and an event file for TensorBoard) or to Weights & Biases. Every 100 evaluations of a loss, or as "
    "--stats-every says.",
)

compile_cache_option: Any = option(
    "--compile-cache",
    metavar="DIR|off",
    envvar="POLICYC_COMPILE_CACHE",
    show_envvar=True,
    callback=lambda _ctx, _option, value: os.path.abspath(value) if value and value != "off" else value,
    show_default="~/.cache/policyc/compiled; JAX's own setting under a policy that keeps every site",
    help="Folder in which compiled programs are kept, so that the next start takes seconds.",
)


# ---- a training step on some devices


def check_source(program: Sequence[str], config: str | None) -> None:
    """Raises a usage error unless exactly one of a program and `--config` is given."""
    if bool(program) == bool(config):
        raise click.UsageError("name a program, or a configuration with --config, but not both")


_FROM_CONFIG = "from the configuration"


@option_class
class StepOptions:
    """Which training step runs on which devices. None stands for the configuration's value."""

    config: str | None = config_option
    target: str = option(metavar="GPU", default=DEFAULT_TARGET, help="The GPU, one of 'policyc targets'.")
    devices: int = number("Number of GPUs.", default=1)
    mesh: str | None = option(
        metavar="AXES",
        show_default="all devices on fsdp",
        help="Sizes of the axes data, fsdp, context, tensor and (only in compile) expert, such as 'fsdp=32 "
        "tensor=4'. A program can use data and fsdp only; 'compile' uses the program's own mesh.",
    )
    batch: int | None = number(
        "Sequences per step.", show_default=f"{_FROM_CONFIG}, but at most 16,384 tokens per device"
    )
    sequence: int | None = number("Tokens per sequence.", show_default=_FROM_CONFIG)
    accumulate: int | None = number(
        "Microbatches per step.", show_default="the fewest with at most two sequences per device at a time"
    )
    remat: str | None = option(
        type=click.Choice(["none", "dots", "full", "quantized"]),
        show_default=f"{_FROM_CONFIG}; none for a program",
        help="What the backward pass recomputes.",
    )
    gather: str | None = option(
        type=click.Choice(["each", "once"]),
        show_default="each",
        help="Gather weights and add gradients over devices for each microbatch, or once per step. "
        "Configurations only.",
    )

    def sizes(self) -> Sizes:
        """The settings that replace those of a configuration."""
        from policyc.hardware.llama_step import Sizes

        return Sizes(
            batch=self.batch,
            sequence=self.sequence,
            accumulate=self.accumulate,
            remat=self.remat,
            gather=self.gather,
        )

    def mesh_shape(self) -> MeshShape:
        """The mesh. The default has all devices on the axis fsdp. Raises ValueError if it does not fit `--devices`."""
        from policyc.hardware.mesh import parse_mesh

        return parse_mesh(self.mesh or f"fsdp={self.devices}", self.devices)

    def of_program(self, plan: Plan) -> TrainingStep:
        """The step of a program with this plan. Options that only change a configuration are ignored."""
        from policyc.hardware.training_step import TrainingStep

        return TrainingStep(plan=plan, accumulate=self.accumulate or 1, remat=self.remat or "none")

    def reject_for_program(self, *names: str) -> None:
        """Raises ValueError if one of these options is given: they only change a configuration."""
        options = [f"--{name}" for name in names if getattr(self, name) is not None]
        if options:
            raise ValueError(
                f"{' and '.join(options)}: a program has its own sizes: set them with its own arguments"
            )


step_options: Decorator = collect_options(StepOptions, "step")
"""The options of a training step, passed as `step`."""
