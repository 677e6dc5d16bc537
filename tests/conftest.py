"""What holds for all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it puts in the background, and processes hand it on: Ctrl-C would do nothing to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
