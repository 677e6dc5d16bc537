"""A target and a draft that reads its hidden states, in one process and on one port.

Imports `target_service` and `draft_service`, which import nothing from here.
"""

from tandem.serving.polling import wait_in_one_thread

wait_in_one_thread()  # here, before anything imports gRPC
