"""A comment allows a code that does not exist.

A misspelt suppression suppresses nothing.

## Bad

```policy
mlp.* -> fp8  # allow: shadowed-rul
```

## Good

```policy
mlp.* -> fp8
```
"""

from policyc.language.diagnostics import Severity

SEVERITY = Severity.WARNING
