"""Data to statistics: batches and the sites of a dense model come in, a `Statistics` object of additive sums goes out.

Everything after it (planning, surgery, steps, api) may import it; it knows nothing of plans.
"""
