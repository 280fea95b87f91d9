"""Reports on runs and sweeps: what their folders hold, as data, as a page and as Markdown.

Reads only files, so it works on runs of any program and on a sweep that is still running.
"""
