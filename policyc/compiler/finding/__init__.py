"""A jaxpr to its sites."""
