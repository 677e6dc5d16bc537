"""What requests and answers carry: bounded, read in good time, and written in parts."""
