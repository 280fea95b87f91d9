"""The self-test: checks whether backends on this machine compute what the emulation does, and times them.

`checks.CHECKS` is the table of checks. `policyc selftest` runs them and writes a page and a JSON file.
"""
