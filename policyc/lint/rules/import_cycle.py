"""A policy imports itself, directly or through others.

Rules override by order, and a circle has none. Move what both files need into a third one.

The bad example is what a file named `a.policy` would hold.

## Bad

```policy
import "a.policy"
```

## Good

```policy
import "fp8.policy"
```
"""
