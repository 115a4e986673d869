"""Presentation of results: turns plans, scores and sweeps into tables, charts and pages.

Only storage and cli import it.
"""
