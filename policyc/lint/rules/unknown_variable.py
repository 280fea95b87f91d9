"""A condition asks for something that a site does not have.

A site has `m`, `n`, `k`, `batch`, `flops` and `weight`.

## Bad

```policy
* where size > 1024 -> bf16
```

## Good

```policy
* where flops > 1024 -> bf16
```
"""
