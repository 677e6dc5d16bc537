"""Steps on a CPU by kernels in C++.

`library` holds the compiled kernels, and `check` compares them with torch before they are used. `layers` are what a
model gets in place of torch's own, `operations` are its small operations as calls, `plans` makes its pass a list of
calls.
"""
