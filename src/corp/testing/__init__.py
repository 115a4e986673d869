"""The contract that every model must pass, as a function that users can run on their own: check_model.

It takes a model and a batch, and returns a `Contract`, which tells whether every property holds. Only tests import it.
"""

from corp.testing.contract import Contract, Row, check_model

__all__ = ["Contract", "Row", "check_model"]
