"""A recipe is named that no statement defines.

Recipes are looked up when the policy is whole, so a recipe may be defined after its use or by an import, but
it must be defined.

## Bad

```policy
mlp.* -> my_recipe
```

## Good

```policy
recipe my_recipe = fp8
mlp.* -> my_recipe
```
"""
