"""A product would be emulated, and native ones were required.

With `--require-native`, every quantized GEMM must be one that the machine multiplies in that format. The message says
what stands in the way: the machine, the format, a shape. Reported when a loss is compiled.

## Bad

```policy
mlp.* -> mxfp4  # no backend has native GEMMs of it
```

## Good

```policy
mlp.* -> nvfp4
```
"""
