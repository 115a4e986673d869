"""Models to folders and back: a `Result` comes in, a folder of safetensors and JSON goes out, whole or not at all.

Only the packages that stand around the core (evaluate, report, cli) import it.
"""
