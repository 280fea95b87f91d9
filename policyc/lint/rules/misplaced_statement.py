"""A statement stands where it has no meaning.

A schedule holds rules and other schedules; a variant holds everything but variants. A recipe that should
change with time is written as two recipes, and a rule for each.

## Bad

```policy
after 50% { recipe nv = bf16 }
```

## Good

```policy
recipe late = bf16
after 50% { mlp.* -> late }
```
"""
