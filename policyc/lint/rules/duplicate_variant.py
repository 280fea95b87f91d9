"""A file defines a variant twice.

A sweep runs variants by name: two of one name cannot both be run.

## Bad

```policy
mlp.* -> fp8
variant a { mlp.* -> bf16 }
variant a { mlp.* -> f32 }
```

## Good

```policy
mlp.* -> fp8
variant a { mlp.* -> bf16 }
variant b { mlp.* -> f32 }
```
"""
