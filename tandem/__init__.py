"""Speculative decoding with the draft model and the target model as separate gRPC services.

This package holds what more than one service needs. It imports none of the services.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tandem-speculative")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
