"""The refit: a pass over recorded blocks of both models that makes layers correct errors of earlier ones.

Only steps and the packages above it import it.
"""
