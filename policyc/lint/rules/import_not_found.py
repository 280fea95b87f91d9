"""An import names a policy that is neither beside the file nor bundled.

The importing file's own folder is searched first, then the bundled policies.

## Bad

```policy
import "my_fp8.policy"
```

## Good

```policy
import "fp8.policy"
```
"""
