"""Compiles a loss and a `Policy` to a quantized loss: trace, analyze, plan, rewrite."""

__all__ = [
    "decisions",
    "execution",
    "first_policy",
    "hoist",
    "idle_rules",
    "kind_tables",
    "linears",
    "pipeline",
    "plan",
    "plan_checks",
    "plan_tables",
    "rewrite",
    "rounding",
    "run_step",
    "schedule",
    "session",
    "site_lists",
    "site_table",
    "sites",
    "stacks",
]
