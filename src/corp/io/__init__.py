"""Output of a run: files that are written completely or not at all, plain tables, and progress for observers.

It takes data and paths, and produces files, text and calls of an `Observer`.
Any package may import it; it imports errors only.
"""
