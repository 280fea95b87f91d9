"""The file cannot be read.

A policy is a file of UTF-8 text, at most 16 MiB. A folder, a file without read permission, a path that does
not exist or bytes that are not UTF-8 end here. A bundled policy can be named without a path: `policyc lint
llama_nvfp4`. `policyc lint` exits with 2, not 1, since it could not look at the policy at all.

The examples show what a readable file holds; this fault is in the file, not in its text.

## Bad

```policy
mlp.* -> bf16
```

## Good

```policy
mlp.* -> bf16
```
"""
