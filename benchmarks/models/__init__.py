"""The models of benchmark runs: the demo pair, pairs of random weights, and services with a set pace."""
