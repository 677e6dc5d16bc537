"""The shared library of kernels: its source, how it is compiled or found in a wheel, and how Python calls it."""
