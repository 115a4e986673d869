"""The contract that every model must pass, as a function that users can run on their own: check_model.

In: any model and a batch. Out: a `Contract`, which tells whether every promise holds. Nothing imports it but tests.
"""

from corp.testing.contract import Contract, Row, check_model

__all__ = ["Contract", "Row", "check_model"]
