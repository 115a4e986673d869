"""From a plan to a smaller model: takes a model and a `Plan`, makes narrower modules with folded compensation.

It knows torch.nn but no model library; measure, adapters and all packages above may import it.
"""
