"""A condition is not one that a site can meet or miss.

`m`, `n`, `k`, `batch` and `flops` are numbers and want a comparison; `weight` is true or false and wants
none.

## Bad

```policy
* where k % 16 -> bf16
```

## Good

```policy
* where k % 16 != 0 -> bf16
```
"""
