"""`pdstore bench`: how fast a store is, beside the plain calls that it stands on."""
