"""Measurements, and the commands that repeat them."""

import os

from tandem.serving.polling import wait_in_one_thread

# Before anything imports gRPC. The client waits as the services do; and gRPC would log a remark on each process
# that is started while it runs.
wait_in_one_thread()
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
