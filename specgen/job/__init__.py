"""Rows in, rows out: readers, prompts, records, the writer and the loop that feeds an engine.

Knows nothing of tensors or of how an engine works: it meets one through the `Engine` protocol in `job.py`.
"""
