"""Bodies of requests and answers: bounded, read in good time, and written in parts."""
