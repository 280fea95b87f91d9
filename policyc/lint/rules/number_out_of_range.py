"""A number is larger than makes sense, or is not whole where it must be.

Steps, indices, sizes and counts are whole numbers of at most 18 digits. Percentages go up to 100, and may
have decimals.

## Bad

```policy
after 110% { mlp.* -> bf16 }
```

## Good

```policy
after 82.5% { mlp.* -> bf16 }
```
"""
