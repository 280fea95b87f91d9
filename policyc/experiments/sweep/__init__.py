"""Sweeps: edited policies, their runs as processes, and the live table.

`edits` and `variants` choose the policies, `probe` plans them for the program, and `manifest` records the design of the
sweep. `commands` builds the runs. The `engine` starts them through `executor` or `slurm`, watches them, and updates
`live`. Each run has a `wrapper` process, which holds the lock of its folder (`liveness`), writes the files of `run`,
and uses the `metrics` to judge how it ended. Nothing here imports JAX, because runs are other processes.
"""
