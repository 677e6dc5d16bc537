"""Load on a coordinator or another server: services without models, and what each process pays for a token.

May import benchmarks.common and tandem; the yardstick (`benchmarks.bench`) imports it."""
