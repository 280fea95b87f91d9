"""A comment allows something that is not there.

It may have been true once. Left in place, it would hide the same fault when it comes back for another reason.
Faults in reading a policy cannot be allowed, so a suppression of one is always unused.

## Bad

```policy
mlp.* -> fp8  # allow: shadowed-rule
```

## Good

```policy
mlp.* -> fp8
```
"""

from policyc.language.diagnostics import Severity

SEVERITY = Severity.WARNING
