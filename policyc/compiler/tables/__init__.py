"""Plans and sites as text."""
