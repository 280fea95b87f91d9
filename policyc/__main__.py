"""The `policyc` command, also as `python -m policyc`."""

import _signal  # type: ignore[import-not-found]  # `signal` imports enum, most of the time until SIGINT is handled

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # While modules are imported, Ctrl-C ends the process without a traceback. `run_command` takes it over.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import os
import sys


def main() -> None:
    """The entry point of the `policyc` command."""
    from policyc.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    if sys.path[:1] == [os.getcwd()]:  # where a json.py would replace Python's
        del sys.path[0]
    main()
