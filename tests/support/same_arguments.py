"""SameArguments: StoreTests for one more configuration of a class of stores that has them all."""

from __future__ import annotations


class SameArguments:
    """Leaves out of StoreTests what a store refuses before it asks anything of its configuration.

    These are 66 of 130 tests. Where two configurations share a class, one of them runs all tests:

        class TestOther(SameArguments, StoreTests): ...
    """

    test_a_key_given_twice_is_refused = None
    test_an_empty_batch_is_zero = None
    test_slots_that_do_not_fit_are_refused = None
    test_what_is_no_key_is_refused = None
    test_what_is_no_namespace_is_refused = None


class SameArgumentsAndBatches(SameArguments):
    """Leaves out the largest batches as well, for stacks of stores that are tested with them."""

    test_a_batch_may_have_2000_keys = None
    test_clear_forgets_3000_values = None
