"""A loss and a `Policy` to a quantized loss: trace, analyze, plan, rewrite."""

__all__ = [
    "execution",
    "hoist",
    "pipeline",
    "plan",
    "plan_checks",
    "plan_tables",
    "rewrite",
    "schedule",
    "session",
    "sites",
]
