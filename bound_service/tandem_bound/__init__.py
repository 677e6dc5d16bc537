"""A target and a draft that reads its hidden states, in one process and on one port.

Imports `target_service` and `draft_service`, which import nothing from here.
"""

from tandem.serving.polling import prepare_grpc

prepare_grpc()  # here, before anything imports gRPC
