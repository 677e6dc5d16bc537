"""Ways to run a step: `cpu_native` by CPU kernels, `eager` by the model's own modules; `selection` chooses.

`core` asks them by the seam in `tandem.engine.steps`; services import none of them.
"""
