"""A load on a coordinator or another server, and services without models to put behind a coordinator."""
