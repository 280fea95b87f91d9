"""Sweeps: edited policies, their runs as submitit jobs, and the live table.

`edits` and `variants` choose the policies, `planning` plans them for the program, and `manifest` records the design of
the sweep. `commands` builds the runs. The `engine` starts them through `local` or `slurm`, reads their `progress`, and
updates `live`. A `run_job` executes a run inside its job, and `judge` says how it ended. Nothing here imports JAX,
because runs are other processes.
"""
