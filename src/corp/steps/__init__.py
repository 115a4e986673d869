"""The steps of corp's functions: a dense model and the data of a run give statistics, a plan and a `Result`.

It combines the packages below it, one step per file; only api and the packages above it import it.
"""
