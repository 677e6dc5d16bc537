"""Rejection sampling: decides which part of a proposal is kept. All functions are pure; random numbers are arguments.

`strategies.resolve` turns options into a rule, whose `accept` decides a `Round`.
"""
