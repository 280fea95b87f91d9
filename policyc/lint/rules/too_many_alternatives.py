"""The braces of one selector stand for more than 1024 selectors.

Each pair of braces multiplies the choices of the others. Use `*` or `?` for the parts that need no list.

## Bad

```policy
{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d}.{a,b,c,d} -> bf16
```

## Good

```policy
?.?.?.?.?.{a,b,c,d} -> bf16
```
"""
