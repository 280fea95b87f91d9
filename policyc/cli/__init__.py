"""The commands, one a file. Each reads its arguments, calls one function below it, and prints."""
