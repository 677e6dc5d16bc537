"""Branches that a draft drafts ahead, a step at a time while nobody waits.

`work` runs the jobs that services submit; only the worker imports it. Services implement `job`.
"""
