"""Rules about what a policy does to a program."""
