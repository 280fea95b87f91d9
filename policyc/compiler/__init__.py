"""A loss and a `Policy` to a quantized loss: trace, analyze, plan, rewrite."""

__all__ = ["analysis", "hoist", "paths", "pipeline", "plan", "plan_tables", "rewrite", "sites", "trace"]
