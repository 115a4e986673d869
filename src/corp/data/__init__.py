"""From files to batches: reads folders of images or texts and makes batches that a model takes.

evaluate and cli import it; the core accepts any iterable of batches and does not need it.
"""
