"""The part of an adapter that is the same for every engine: a request's plans and its record."""
