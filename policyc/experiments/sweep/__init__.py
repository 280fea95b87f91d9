"""Sweeps: edited policies, their runs as processes, and the live table.

`edits` and `variants` say which policies run, `probe` plans them for the program, `manifest` keeps what the sweep is.
`commands` makes the runs. The `engine` starts them through `executor` or `slurm`, watches them, and tells `live`. Each
is run by a `wrapper`, which holds the lock of its folder (`liveness`), writes the files of `run`, and judges how it
ended by its `metrics`. Nothing here imports JAX: the runs are other processes.
"""
