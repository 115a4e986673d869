"""The mathematics: pure functions with the letters of the paper. Tensors come in, tensors go out, on the same device.

Any package may import it; it imports torch and `corp.errors` only.
"""
