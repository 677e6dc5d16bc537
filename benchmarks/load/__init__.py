"""Load on a coordinator or another server: services without models, and what each process pays for a token.

May import benchmarks.services and tandem; the yardstick (`benchmarks.bench`) imports it."""
