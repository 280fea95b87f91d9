"""Lint rules that check what a policy does to a program. Each module is named after its code."""
