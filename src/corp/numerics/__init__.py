"""The mathematics: pure functions in the paper's notation, from tensors to tensors on the same device.

Any package may import it; it imports torch and `corp.errors` only.
"""
