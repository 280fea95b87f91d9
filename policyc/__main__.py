"""`python -m policyc`."""

from policyc.cli import main

if __name__ == "__main__":
    main()
