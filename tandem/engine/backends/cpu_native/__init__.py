"""Steps on a CPU by kernels in C++, which take the place of torch's linear layers, attention and small operations.

`library` holds the compiled kernels, and `check` compares them with torch before they are used. `linear` and
`attention` are what a model gets in place of torch's own, and `pointwise` knows the small operations. `plans` makes a
model's pass a list of calls.
"""
