"""The command line, one command per module. A command reads its options, calls a lower package, and prints."""

__all__ = ["main"]
