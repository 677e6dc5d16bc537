"""The life of a sequence's stream on a service, alone or multiplexed with others.

Imported by the servicers of draft and target.
"""
