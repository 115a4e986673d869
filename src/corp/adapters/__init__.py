"""From a library's model to sites: takes a model, returns `Sites` that point to its layers. Adapters never compute.

Only steps, api and the packages above them import it; only the chosen adapter imports timm or transformers.
"""
