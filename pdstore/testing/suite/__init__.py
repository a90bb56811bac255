"""The Store contract as tests, one file per part of the contract."""
