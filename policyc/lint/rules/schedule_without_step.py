"""A policy has a schedule, and the program does not say at which step it is.

`after` and `until` need the step. A training loop tells it with `policyc.set_step(n, total=N)` before each step; a
program that never does cannot be run under a schedule. Reported when a loss is compiled.

## Bad

```policy
mlp.* -> fp8
after 90% { mlp.* -> bf16 }
```

## Good

```policy
mlp.* -> fp8
```
"""
