"""The text is not a statement of the language.

Every statement is tried alone, so the faults below this one are real. A statement is a rule (`selectors ->
recipe`), a `recipe`, an `import`, a schedule (`after`, `until`) or a `variant`; statements are separated by
line ends or semicolons. A statement goes on over a line end inside parentheses, and after a comma, an arrow
or an operator.

A scope whose name is a word of the language at the start of a line is written with a `*.` before it:
`*.recipe`.

## Bad

```policy
mlp.* => bf16
```

## Good

```policy
mlp.* -> bf16
```
"""
