"""Results for people: plans, scores and sweeps come in, tables, charts and pages go out.

Only storage and cli import it.
"""
