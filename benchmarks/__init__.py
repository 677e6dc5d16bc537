"""What was measured, and the commands that measure it."""

import os

from tandem.serving.polling import wait_in_one_thread

# Here, where nothing has imported gRPC yet. The client waits as the services do; and gRPC would remark on each process
# that is started while it runs.
wait_in_one_thread()
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
