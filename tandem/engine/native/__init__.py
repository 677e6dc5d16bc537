"""Kernels in C++ that are compiled on the machine that runs them, and what puts them in place of torch's.

`build` compiles, `kernels` calls, `check` compares them with torch before they are used, `linear` and `attention` are
what a model gets in place of torch's own. `trace` learns a model's pass, `binding` makes it a list of calls, those of
`pointwise` among them, and a `tape` of `steps` plays the list.
"""
