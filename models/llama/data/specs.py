"""Specs of data, as in `--data`: `KIND:PATH,option=value`, or a blend `SPEC@WEIGHT SPEC@WEIGHT`."""

import difflib
import glob
import os
import re
import shlex
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from policyc.models.llama.configs import ConfigError

OPTIONS: dict[str, tuple[str, ...]] = {
    "stdlib": (),
    "synthetic": (),
    "text": ("validation",),
    "tokens": ("dtype", "end", "validation"),
    "jsonl": ("column", "shuffle", "validation"),
    "parquet": ("column", "shuffle", "validation"),
    "hf": ("column", "name", "split", "revision", "shuffle", "validation", "validation_split"),
}
"""The kinds of data, and the options of each."""

STREAMS = ("jsonl", "parquet", "hf")
SUFFIXES: dict[str, tuple[str, ...]] = {
    "tokens": (".bin", ".npy"),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
}
SHUFFLE = 1000  # documents in the window in which a stream is shuffled
VALUES = {"dtype": r"uint16|uint32", "end": r"\d{1,9}", "shuffle": r"\d{1,9}"}


class DataSpec(NamedTuple):
    """`KIND:PATH,option=value`, as in `--data`."""

    kind: str
    path: str
    options: dict[str, str]

    @property
    def is_stream(self) -> bool:
        """Whether the data is read during training, instead of being tokenized in advance."""
        return self.kind in STREAMS

    @property
    def column(self) -> str:
        return self.options.get("column", "text")

    @property
    def name(self) -> str:
        return self.path or self.kind

    def of_validation(self) -> "DataSpec":
        """The validation data that the options name, or this data if they name none."""
        options = dict(self.options)
        if "validation_split" in options:
            options["split"] = options["validation_split"]
        return DataSpec(self.kind, options.get("validation", self.path), options)

    @property
    def has_validation(self) -> bool:
        return not {"validation", "validation_split"}.isdisjoint(self.options)


def parse_spec(text: str) -> DataSpec:
    path, options = text, {}
    while match := re.fullmatch(r"(.*),(\w+)=([^,=]*)", path):
        path, options[match[2]] = match[1], match[3]
    kind, colon, rest = path.partition(":")
    if kind in OPTIONS and (colon or kind in ("stdlib", "synthetic")):
        path = rest
    elif colon and len(kind) > 1 and not glob.glob(path):
        raise ConfigError(f"there is no kind of data '{kind}': the kinds are {', '.join(OPTIONS)}")
    else:
        kind = _guess_kind(path)
    spec = DataSpec(kind, path, options)
    _check_options(spec)
    return spec


def _guess_kind(path: str) -> str:
    """The kind of the files at a path, from their suffixes."""
    kinds = {
        next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), "text")
        for name in glob.glob(path, recursive=True) or [path]
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"'{path}' names files of several kinds: {', '.join(sorted(kinds))}; write KIND:PATH"
        )
    if path.endswith(".json"):
        raise ConfigError(f"'{path}': write jsonl:{path} if each line is an object, text:{path} if not")
    return kinds.pop()


def _check_options(spec: DataSpec) -> None:
    known = OPTIONS[spec.kind]
    for name, value in spec.options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            there_are = f"its options are {', '.join(known)}" if known else "it has none"
            remedy = f"did you mean {close[0]}?" if close else there_are
            raise ConfigError(f"data of kind {spec.kind} has no option '{name}': {remedy}")
        if name in VALUES and not re.fullmatch(VALUES[name], value):
            expected = VALUES[name].replace("|", " or ").replace(r"\d{1,9}", "a whole number")
            raise ConfigError(f"{name}={value}: expected {expected}")


class BlendPart(NamedTuple):
    """A source of a blend, and its share of the rows relative to the other weights."""

    spec: DataSpec
    weight: Fraction


def parse_blend(text: str) -> list[BlendPart]:
    """The sources of `--data`. A single spec is a blend of one."""
    if not re.search(r"@[^@\s/,]*(\s|$)", text) or glob.glob(text):
        return [BlendPart(parse_spec(text), Fraction(1))]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--data {text}: {error}") from None
    names, _, weights = zip(*(word.rpartition("@") for word in words), strict=True)
    shares = [_parse_weight(*pair) for pair in zip(words, weights, strict=True)]
    return [BlendPart(parse_spec(name), share) for name, share in zip(names, shares, strict=True)]


def _parse_weight(word: str, weight: str) -> Fraction:
    try:
        share = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if "@" not in word or share <= 0:
        raise ConfigError(
            f"--data: '{word}' has no positive weight: each part of a blend is SPEC@WEIGHT, as in 'a.bin@0.7 b.bin@0.3'"
        )
    return share


def list_files(path: str) -> list[Path]:
    files = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    if os.path.isdir(path):
        raise ConfigError(f"'{path}' is a folder: name its files, such as '{path.rstrip('/')}/**/*.txt'")
    if not files:
        raise ConfigError(f"there is no file '{path}'")
    return files
