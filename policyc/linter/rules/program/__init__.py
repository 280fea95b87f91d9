"""Checks of what a policy does to a program. Each module lists its checks by code in `CHECKS`."""
