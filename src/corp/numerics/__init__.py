"""The paper's mathematics: pure functions, tensors in, tensors out. Imports torch and errors only."""
