"""Sites and a policy to a plan, and the warnings about it."""
