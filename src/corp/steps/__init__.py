"""The steps of the verbs: a dense model and the data of one run come in; statistics, a plan and a `Result` go out.

It puts the packages below it together, one step per file; only api and the packages above it import it.
"""
