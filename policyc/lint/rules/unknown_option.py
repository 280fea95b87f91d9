"""A format is given an option that it does not have.

An option that is passed over in silence is an ablation that measured nothing. Options belong to formats: `sr`
to `nvfp4` and `mxfp4`, `grad` to `fp8`. A named recipe takes no options where it is used.

## Bad

```policy
mlp.* -> fp8(sr=grad)
```

## Good

```policy
mlp.* -> fp8(grad=e4m3)
```
"""
