"""`tandem audit`: is a server's speculative decoding lossless? Needs neither torch nor the coordinator.

`statistics` weighs tokens, `client` asks for them within a budget, `checks` ask the same thing in several ways, `run`
is an audit from start to end, `report` shows it. docs/audit.md explains each test.
"""
