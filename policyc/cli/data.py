"""`policyc data`: trains tokenizers and writes token files for the bundled Llama."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from policyc.base.files import atomic_write
from policyc.base.progress import stage
from policyc.cli.common import EXIT_USAGE, ExampleCommand, exit_with_message, explain_missing_package
from policyc.cli.options import number

if TYPE_CHECKING:
    from policyc.models.llama.corpora import TextCount

_MEGABYTE = 10**6


@click.group()
def data() -> None:
    """Prepare data for the bundled Llama: tokenizers and token files.

    A CORPUS is a source of text as in --data of the training program: stdlib, PATH, or KIND:PATH,option=value.
    """


_MAX_BAD_ROWS = number(
    "Maximum number of rows without readable text to skip; one more is an error.",
    "--max-bad-rows",
    least=0,
    default=10,
)


@data.command(
    "train-tokenizer",
    cls=ExampleCommand,
    examples="""
    policyc data train-tokenizer 'text:books/*.txt'                           32,000 tokens, into tokenizer.json
    policyc data train-tokenizer stdlib a.parquet --vocab 8192 --out bpe.json   from two corpora
    """,
)
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@number(
    "Number of tokens: every byte, the end token and more. 32000 is the vocabulary of 30m to 200m.",
    "--vocab",
    least=257,
    most=1 << 24,
    default=32000,
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    default="tokenizer.json",
    show_default=True,
    help="File to write.",
)
@number("Read at most this much text of each corpus.", "--megabytes", default=1000)
@_MAX_BAD_ROWS
def train_tokenizer(
    corpora: tuple[str, ...], vocab: int, out: str, megabytes: int, max_bad_rows: int
) -> None:
    """Train a byte-level BPE tokenizer, with an end token.

    The same text gives the same file.
    """
    with _explain_errors():
        from policyc.models.llama import corpora as tools

        with stage("training the tokenizer"), _open_output(out) as stream:
            bpe = tools.train_tokenizer(_read_corpora(corpora, max_bad_rows, megabytes), vocab)
            content = str(bpe.to_str(pretty=True)).encode()
            stream.write(content)
    size = bpe.get_vocab_size()
    if size < vocab:
        click.echo(f"warning: the text yields only {size:,} tokens: add text, or lower --vocab", err=True)
    click.echo(f"{out}: {size:,} tokens, sha256 {hashlib.sha256(content).hexdigest()}")


@data.command(
    cls=ExampleCommand,
    examples="""
    policyc data tokenize 'text:books/*.txt' --tokenizer tokenizer.json --out train.bin
    policyc data tokenize a.parquet b.jsonl --tokenizer tokenizer.json --out train.bin
    """,
)
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option(
    "--tokenizer",
    type=click.Path(dir_okay=False),
    show_default="tokens are bytes",
    help="A tokenizer.json.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    required=True,
    help="Token file to write. Its name must end in .bin.",
)
@_MAX_BAD_ROWS
def tokenize(corpora: tuple[str, ...], tokenizer: str | None, out: str, max_bad_rows: int) -> None:
    """Tokenize corpora once, into a token file.

    Each document ends with the end token. Tokens are uint16, or uint32 if the vocabulary is larger.
    """
    if not out.endswith(".bin"):
        raise click.UsageError(f"'{out}': the name of a token file must end in .bin")
    with _explain_errors():
        from policyc.models.llama import corpora as tools

        with _open_output(out) as stream:
            file = tools.write_tokens(_read_corpora(corpora, max_bad_rows), tokenizer, stream)
    count = file.count
    click.echo(
        f"{out}: {count.documents:,} documents, {count.tokens:,} tokens, {count.bytes_per_token:.2f} bytes per token, "
        f"sha256 {file.sha256}"
    )
    tokens = f"--data 'tokens:{out},dtype={file.dtype},end={file.end}'"
    click.echo(f"train with: {tokens}" + (f" --tokenizer {shlex.quote(tokenizer)}" if tokenizer else ""))


def _read_corpora(
    corpora: tuple[str, ...], max_bad_rows: int, megabytes: int | None = None
) -> Iterator[bytes]:
    """Yields the documents of several corpora, one after the other: at most `megabytes` of each, or all if None."""
    from policyc.models.llama.corpora import TextCount, read_corpus

    limit = None if megabytes is None else megabytes * _MEGABYTE
    for spec in corpora:
        count = TextCount()
        with stage(f"reading {spec}"):
            yield from read_corpus(spec, limit, max_bad_rows, count)
        click.echo(_describe_text(spec, count), err=True)


def _describe_text(spec: str, count: TextCount) -> str:
    text = f"read {spec}: {count.documents:,} documents, {count.bytes / _MEGABYTE:,.1f} MB"
    if count.not_utf8:
        text += f"; {count.not_utf8:,} are not UTF-8: a tokenizer sees their invalid bytes as U+FFFD"
    if count.is_cut:
        text += "; the rest was not read (--megabytes)"
    return text


@contextmanager
def _open_output(name: str) -> Iterator[BinaryIO]:
    """Opens a file that appears only if the block succeeds. Exits if it cannot be written."""
    try:
        with atomic_write(Path(name)) as stream:
            yield stream
    except OSError as error:
        exit_with_message(f"{name} cannot be written: {error.strerror}", EXIT_USAGE)


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Turns configuration errors and missing packages into messages that say what to do, and exits."""
    from policyc.models.llama.configs import ConfigError

    try:
        with explain_missing_package("train,data"):
            yield
    except ConfigError as error:
        exit_with_message(str(error))
