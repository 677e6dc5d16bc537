"""Steps on a CPU by kernels in C++.

`library` holds the compiled kernels. `layers` are what a model gets in place of torch's own, `plans` makes its pass a
list of calls, and `backend` runs steps by them.
"""
