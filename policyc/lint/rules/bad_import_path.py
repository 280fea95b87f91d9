"""An import names something that is not a relative path to a policy.

An import reads only files that end in `.policy`, by a path relative to the importing file, with `/` between
folders; the ending may be left out. A policy from elsewhere can therefore be linted without fear of what it
would read.

## Bad

```policy
import "/etc/passwd"
```

## Good

```policy
import "fp8.policy"
```
"""
