"""`python -m policyc`."""

import os
import sys

if __name__ == "__main__":
    if sys.path[:1] == [
        os.getcwd()
    ]:  # `-m` puts the current folder first, where a json.py would replace Python's
        del sys.path[0]

    from policyc.cli.main import main

    main()
