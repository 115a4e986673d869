"""A saved model to other programs: a compact folder comes in, one that needs no corp goes out, compared with it.

Only storage.folder and cli import it.
"""
