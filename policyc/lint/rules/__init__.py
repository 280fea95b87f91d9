"""One lint rule per file. The file name is the code, the docstring is the page."""
