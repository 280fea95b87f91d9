"""Two options of a recipe exclude each other.

MS-EDEN rotates and rounds by itself, so `sr`, `rht`, `scale2d` and `scale=four_over_six` have nothing left to
do; four_over_six is for operands that are rounded to nearest; a 16x16 tile cannot have one scale per row.

## Bad

```policy
attention.wo @ bwd -> nvfp4(rounding=ms_eden, sr=grad)
```

## Good

```policy
attention.wo @ bwd -> nvfp4(rounding=ms_eden)
```
"""
