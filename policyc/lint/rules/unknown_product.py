"""A product is not one of the three.

A linear layer has the products `fprop`, `dgrad` and `wgrad`; `bwd` is the last two.

## Bad

```policy
mlp.* @ forward -> bf16
```

## Good

```policy
mlp.* @ fprop -> bf16
```
"""
