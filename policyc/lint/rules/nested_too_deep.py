"""Brackets, splits, or recipes named by recipes, go deeper than anyone can follow.

The limit is 32, and 4 for a `split` in a `split`. Nobody writes such a thing by hand, and what a program writes can be
flattened: name the last recipe directly, or write several rules.

## Bad

```policy
mlp where (((((((((((((((((((((((((((((((((weight))))))))))))))))))))))))))))))))) -> bf16
```

## Good

```policy
mlp where weight -> bf16
```
"""
