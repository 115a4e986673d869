"""Files to batches: folders of images or texts come in, batches that a model takes go out.

evaluate and cli import it; the core takes any iterable of batches and does not.
"""
