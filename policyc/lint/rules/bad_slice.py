"""An index or a slice cannot be read.

`layers[3]` is one layer; `layers[-4:]`, `layers[:2]`, `layers[::2]` are slices as in Python, with a step of
at least 1. Percentages of the depth stand only in slices: `layers[-15%:]`.

## Bad

```policy
layers[50%].mlp -> bf16
```

## Good

```policy
layers[50%:].mlp -> bf16
```
"""
