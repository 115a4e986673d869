"""The pass over the pruned model: recorded blocks of both models come in, layers that repair earlier errors go out.

Only steps and the packages above it import it.
"""
