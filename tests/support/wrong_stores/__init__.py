"""Stores that break the contract, one way each; StoreTests must fail every one."""
