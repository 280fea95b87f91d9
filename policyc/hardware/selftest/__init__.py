"""The self-test: whether backends compute on this machine what the emulation says they should, and how fast.

`checks.CHECKS` is the table of checks. `policyc selftest` runs them and writes a page and a JSON file.
"""
