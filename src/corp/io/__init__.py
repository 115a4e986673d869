"""What a run writes and shows: files that appear whole or not at all, plain tables, and progress for whoever watches.

Data and paths come in; files, text and calls of an `Observer` go out.
Any package may import it; it imports errors only.
"""
