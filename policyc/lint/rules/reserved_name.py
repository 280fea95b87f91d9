"""A recipe has the name of a format.

`recipe bf16 = fp8` would make every rule that says `bf16` lie.

## Bad

```policy
recipe bf16 = fp8
mlp.* -> bf16
```

## Good

```policy
recipe low = fp8
mlp.* -> low
```
"""
