"""Evaluation of pruned models: takes models and data, returns scores with intervals.

It calls the public functions of `corp.api`; testing and cli import it.
"""
