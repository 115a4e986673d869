"""Exports to other programs: turns a compact folder into one that does not need corp, and compares the two.

Only storage.folder and cli import it.
"""
