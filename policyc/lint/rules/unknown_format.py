"""A format does not exist.

A rule would otherwise run in a precision nobody asked for. The formats are `nvfp4`, `mxfp4`, `mxfp8`, `fp8`,
`bf16`, `f32` and `keep`.

## Bad

```policy
mlp.* -> nvfp5(sr=grad)
```

## Good

```policy
mlp.* -> fp8
```
"""
