"""What a site is for: its kind, and its block."""
