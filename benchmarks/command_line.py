"""Command-line parser and Markdown tables, shared by the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help starts with the docstring of a benchmark, verbatim."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_header(titles: Sequence[str]) -> None:
    """Prints the header of a Markdown table."""
    print_row(titles)
    print(f"|{'---|' * len(titles)}")


def print_row(cells: Sequence[str]) -> None:
    """Prints a row of a Markdown table, and flushes it: the next row may take minutes."""
    print(f"| {' | '.join(cells)} |", flush=True)
