"""A backend was asked for whose library is not installed.

`--backend te` runs products by Transformer Engine, which policyc does not install. The message has the command that
does. Reported when a loss is compiled for the devices here; a plan for another target needs no library.

## Bad

```policy
mlp.* -> nvfp4  # policyc apply --backend te, on a Blackwell GPU, without Transformer Engine
```

## Good

```policy
mlp.* -> nvfp4  # policyc apply --backend auto: the same numbers by XLA's own GEMMs
```
"""
