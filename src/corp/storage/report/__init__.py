"""Results for people: plans, scores and sweeps come in, tables, charts and pages go out.

Only the rest of storage, and cli, import it.
"""
