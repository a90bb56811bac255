"""Outcomes: every error of pdstore has its reason, and an unknown one is a fault."""

from __future__ import annotations

import pytest

from pdstore import errors
from pdstore.outcome import Reason, reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.StoreUnavailable("x"), Reason.STORE_DOWN),
        (errors.StoreClosed("x"), Reason.CLOSED),
        (errors.StoreError("x"), Reason.STORE_ERROR),
        (errors.WrongLength("x"), Reason.CORRUPT),
        (errors.OtherSeal("x"), Reason.OTHER_SEAL),
        (errors.Forged("x"), Reason.FORGED),
        (errors.SwapError("x"), Reason.FAULT),
        (RuntimeError("x"), Reason.FAULT),
        (TimeoutError("not the store's"), Reason.FAULT),
    ],
)
def test_an_error_has_its_reason(error, reason):
    assert reason_of(error) is reason
