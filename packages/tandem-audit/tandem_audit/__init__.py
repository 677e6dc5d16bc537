"""Is a server's speculative decoding lossless? Asks any OpenAI-compatible server, from outside.

`statistics` weighs tokens, `client` asks for them within a budget, `checks` ask the same thing in several ways, `run`
is an audit from start to end, `report` shows it, `command` is the command line. `simulation` has samplers with planted
faults, and counts how often an audit finds them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tandem-audit")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
