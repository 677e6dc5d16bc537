"""The configuration of speculative decoding: one class, the rules it keeps, and the places it is read from."""

from tandem.config.speculative import SpeculativeConfig

__all__ = ["SpeculativeConfig"]
