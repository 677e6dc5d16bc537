"""The rounds of a request: the session that has them, and its two sides, on whichever replicas are there."""
