"""An option is given twice.

One of the two would have to be ignored. `--fix` removes the second where it says the same.

## Bad

```policy
mlp.* -> fp8(grad=e4m3, grad=e4m3)
```

## Good

```policy
mlp.* -> fp8(grad=e4m3)
```
"""
