"""An option is given a value that it does not take.

`rht` and `sr` take operands: a product (`wgrad`), a role (`grad`), both (`wgrad.grad`), or several in braces.

## Bad

```policy
mlp.* -> fp8(grad=e3m4)
```

## Good

```policy
mlp.* -> fp8(grad=e4m3)
```
"""
