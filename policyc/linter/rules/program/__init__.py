"""Checks of what a policy does to a program, by code: `CHECKS` of each module."""
