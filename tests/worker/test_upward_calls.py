"""A job's control stands in one place: a share makes few calls upward between worker's rooms."""

from __future__ import annotations

import pytest

from tests.support.house import imports
from tests.support.room_calls import JOBS, STORES, calls_of_a_job, floors_of

MAX_UPWARD = 6
"""The share, its copies' end, the job's end, its progress, and who hears of it: nothing is asked
twice. `python -m tests.support.house --calls` prints them."""


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("store", STORES)
def test_a_share_makes_few_calls_upward(job, store, tmp_path):
    (tmp_path / "values").mkdir()
    upward = calls_of_a_job(job, STORES[store].format(path=tmp_path)).upward(floors_of(imports()))
    assert 0 < upward.total() <= MAX_UPWARD, "\n".join(map(str, upward.elements()))
