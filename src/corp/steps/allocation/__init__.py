"""Budget to widths: a target and the error curve of every site come in, the width of every site goes out.

With held-out batches it also tries models and compares them with the dense one. Only the other steps and the
packages above them import it.
"""
