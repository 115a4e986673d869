"""From data to statistics: takes batches and the sites of a dense model, returns a `Statistics` of additive sums.

All later packages (planning, surgery, steps, api) may import it; it does not depend on plans.
"""
