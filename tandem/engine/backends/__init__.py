"""Ways to run a step: `cpu_native` by CPU kernels, `eager` by the model's own modules."""
