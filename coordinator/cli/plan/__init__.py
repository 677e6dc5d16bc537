"""`tandem plan`: the command, the measurement of a pair on this machine, and the chart."""
