"""Plan to smaller model: a model and a `Plan` come in, narrower modules with the compensation folded in go out.

It knows torch.nn and nothing of any model library; measure, adapters and everything above may import it.
"""
