"""A recipe is made of itself.

Following the names from one recipe to the next leads back to the first: there is no format at the end of it.

## Bad

```policy
recipe a = b
recipe b = a
mlp.* -> a
```

## Good

```policy
recipe a = b
recipe b = fp8
mlp.* -> a
```
"""
