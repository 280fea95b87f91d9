"""The `policyc` command, also as `python -m policyc`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While modules are imported, Ctrl-C ends the process without a traceback. `run_command` takes it over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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
