"""What the benchmarks share: the parser of their command lines, and tables in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help starts with the docstring of a benchmark, as it is written."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_header(titles: Sequence[str]) -> None:
    """Prints the first lines of a table in Markdown."""
    print_row(titles)
    print(f"|{'---|' * len(titles)}")


def print_row(cells: Sequence[str]) -> None:
    """Prints a line of a table in Markdown, at once: a row may take minutes."""
    print(f"| {' | '.join(cells)} |", flush=True)
