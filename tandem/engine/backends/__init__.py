"""Ways to run a step: captured CUDA graphs, CPU kernels, and eagerly by the model's own modules.

The core picks them; a backend imports `models` and `kv_cache`, and no backend imports another but `eager`.
"""
