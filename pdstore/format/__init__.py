"""The format that P and D agree on: namespace, keys, stored values, hand-offs, layout."""
