"""Training programs that ship with policyc. They use only its public API."""

__all__ = ["llama"]
