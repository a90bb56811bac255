"""What P and D must agree on: namespace, block keys, stored values, hand-offs, layout."""
