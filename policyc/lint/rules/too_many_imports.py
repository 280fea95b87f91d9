"""A policy imports more than 256 files in all.

Imports are counted each time they are read, so that a few files that import each other many times over end
here and not in a full memory.

The bad example stands for a file with 257 such lines.

## Bad

```policy
import "fp8.policy"
```

## Good

```policy
import "fp8.policy"
```
"""
