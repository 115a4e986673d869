"""Saving and loading: writes a `Result` as a folder of safetensors and JSON, completely or not at all, and reads it.

It also contains exports to other programs, and pruning from folder to folder (`streamed`).
Only testing and cli import it.
"""
