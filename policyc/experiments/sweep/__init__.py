"""Sweeps: edited policies, their runs as processes, and the live table.

Nothing here imports JAX: the runs are other processes.
"""
