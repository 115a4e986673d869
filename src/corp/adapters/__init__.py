"""Library to sites: a model comes in, a `Sites` list that points at its layers goes out. Adapters never compute.

Only steps, api and the packages above it import it; timm and transformers are imported by the adapter that was chosen.
"""
