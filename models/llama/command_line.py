"""The command line of the training program, and its settings files."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from policyc.models.llama.configs import (
    CONFIGS,
    ConfigError,
    ModelConfig,
    RunConfig,
    find_config,
    invalid_settings,
    read_file,
)

EXAMPLES = """examples:
  python models/llama/train.py --config tiny
  python models/llama/train.py --config 30m --data corpus.bin --batch 64 --accumulate 8 --eval-every 200
  python models/llama/train.py --settings run.toml --seed 1
  python models/llama/train.py --config llama3_8b --fsdp-axis 8 --distributed --folder runs/8b
  policyc apply llama_nvfp4 models/llama/train.py --config tiny
"""

GROUPS: dict[str, str] = {
    "steps": "run",
    "data": "data",
    "optimizer": "optimizer",
    "loss_scale": "faults",
    "gather": "devices and hosts",
    "checkpoint_every": "checkpoints and weights",
    "eval_every": "validation and exports",
    "log_every": "metrics and profiles",
    "layers": "model",
}
"""The groups of options in the help, keyed by the first setting of each group."""

# Options of other training programs, and what to use instead.
OTHER_NAMES = {
    "lr": "did you mean --learning-rate?",
    "epochs": "set --steps instead; the data repeats as needed",
    "resume": "the same command resumes a run by itself; --resume-from starts from a checkpoint of another run",
}

FIELDS: dict[str, Field[Any]] = {f.name: f for config in (RunConfig, ModelConfig) for f in fields(config)}
TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool}


def parse_args(arguments: Sequence[str] | None = None) -> tuple[str, ModelConfig, RunConfig]:
    """Parses a command line. Returns the name of the configuration, the model and the run.

    Options override the settings file, and the settings file overrides the configuration.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        "train.py", "train.py [--help] [--config NAME] [--settings FILE] [OPTION ...]", "Pretrain a Llama.", EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    try:
        name, file, settings = _find_configuration(words)
    except ConfigError as error:
        parser.error(str(error))
    _add_sources(parser)
    _add_options(parser, name)
    parsed = argparse.Namespace()
    for parser.prog, source in ((f"train.py: --settings {file}", settings), ("train.py", words)):
        _, unknown = parser.parse_known_args(source, parsed)
        if unknown:
            options = [word for word in unknown if word.startswith("-")]  # the others may be their values
            parser.error("; ".join(map(_explain_unknown, options or unknown)))
    values = {n: v for n, v in vars(parsed).items() if n in FIELDS and v is not None}
    model, run = CONFIGS[name]
    model = replace(model, **{n: v for n, v in values.items() if hasattr(model, n)})
    run = replace(run, **{n: v for n, v in values.items() if hasattr(run, n)})
    if errors := invalid_settings(model, run):
        parser.error("; ".join(errors))
    return name, model, run


def format_options(arguments: Sequence[str]) -> str:
    """The help for all options, with the defaults of the configuration that a command line names."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    try:
        name = _find_configuration(arguments)[0]
        _add_sources(parser)
    except ConfigError:
        name = "tiny"
    _add_options(parser, name)
    return parser.format_help()


def _find_configuration(arguments: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The name of the configuration, the settings file that a command line names, and its settings as options."""
    parser = _add_sources(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    _refuse_controls(arguments)
    known, _ = parser.parse_known_args(arguments)
    settings = read_settings(Path(known.settings)) if known.settings else []
    _refuse_controls(settings)
    name = known.config or parser.parse_known_args(settings)[0].config or "tiny"
    find_config(name)
    return name, known.settings, settings


def _refuse_controls(words: Sequence[str]) -> None:
    """Raises ConfigError for control characters: a terminal would act on them in every message about a setting."""
    if faulty := [word for word in words if re.search(r"[\x00-\x1f\x7f-\x9f]", word)]:
        raise ConfigError(f"{faulty[0]!r} has control characters")


def _explain_unknown(word: str) -> str:
    """The error message for a word of the command line that is neither an option nor the value of one."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if not word.startswith("-"):
        return f"'{word}' does not belong to any option"
    if name in OTHER_NAMES:
        return f"there is no option '{word}': {OTHER_NAMES[name]}"
    close = difflib.get_close_matches(name, [*FIELDS, "config", "settings"], n=1)
    remedy = f"did you mean --{close[0].replace('_', '-')}?" if close else "--help lists all options"
    return f"there is no option '{word}': {remedy}"


def _add_sources(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--config", metavar="NAME", help=f"one of {', '.join(CONFIGS)} (default: tiny)")
    parser.add_argument(
        "--settings", metavar="FILE", help="TOML file of settings, such as `learning_rate = 1e-3`"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser, config: str) -> None:
    """Adds an option for each setting, in groups. The help shows its default in the configuration."""
    model, run = CONFIGS[config]
    defaults = {**vars(model), **vars(run)}
    group: Any = parser
    for name, setting in FIELDS.items():
        if name in GROUPS:
            about = f"of {config}" if GROUPS[name] == "model" else None
            group = parser.add_argument_group(GROUPS[name], about)
        options: Any = {
            "type": TYPES.get(_type_name(setting), str),
            "choices": setting.metadata["choices"],
        }
        if setting.type == "bool":
            options = {"action": argparse.BooleanOptionalAction}
        elif setting.metadata["choices"] is None:
            options["metavar"] = {"int": "N", "float": "X"}.get(_type_name(setting), "TEXT")
        text = setting.metadata["help"].replace("%", "%%")
        if defaults[name] is not None:
            text += f" (default: {defaults[name]})"
        group.add_argument("--" + name.replace("_", "-"), help=text, **options)


def _type_name(setting: Field[Any]) -> str:
    return str(setting.type).split(" ")[0]


def read_settings(path: Path) -> list[str]:
    """Reads the settings of a TOML file, as command-line options."""
    try:
        content = tomllib.loads(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"--settings {path}: {reason}") from None
    return [_as_option(path, key, value) for key, value in content.items()]


def _as_option(path: Path, key: str, value: Any) -> str:
    name = key.replace("_", "-")
    if name == "settings":
        raise ConfigError(f"--settings {path}: a settings file cannot name another settings file")
    if not isinstance(value, str | int | float):
        raise ConfigError(f"--settings {path}: {key} = {value!r}: expected a string, a number, true or false")
    is_flag = isinstance(value, bool) and getattr(FIELDS.get(name.replace("-", "_")), "type", "") == "bool"
    return f"--{'' if value else 'no-'}{name}" if is_flag else f"--{name}={value}"
