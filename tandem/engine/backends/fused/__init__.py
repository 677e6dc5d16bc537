"""Layers of the Llama family in fewer kernels, in place of transformers' own. The engine's backends import it."""
