"""Reports on the folders of runs and sweeps, as data, as an HTML page or as Markdown.

Reads only files, so it works on runs of any program and on a sweep that is still running.
"""
