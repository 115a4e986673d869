"""Models to folders and back: a `Result` comes in, a folder of safetensors and JSON goes out, whole or not at all.

Its parts are exports to other programs, and pruning from folder to folder (`streamed`).
Only testing and cli import it.
"""
