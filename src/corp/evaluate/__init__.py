"""Judgement of pruned models: models and data come in, scores with intervals go out.

It calls the public verbs of `corp.api`; testing and cli import it.
"""
