"""The `policyc` command, also as `python -m policyc`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While modules are imported, Ctrl-C ends the process without a traceback. `run_command` takes it over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from policyc.cli.main import main

if __name__ == "__main__":
    main()
