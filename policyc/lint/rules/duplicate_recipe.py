"""A file defines a recipe twice.

One of the two would be lost. To change an imported recipe, define it again after the import: that replaces it
in the imported rules too. An import after the definition is reported, since it would undo it.

## Bad

```policy
recipe a = fp8
recipe a = bf16
mlp.* -> a
```

## Good

```policy
recipe a = fp8
mlp.* -> a
```
"""
