"""From a budget to widths: takes a target and the error curve of every site, returns the width of every site.

With held-out batches it also tries models and compares them with the dense one. Only the other steps and the
packages above them import it.
"""
