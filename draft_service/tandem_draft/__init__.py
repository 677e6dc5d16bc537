"""The draft service: proposes tokens that a target model is likely to produce next."""

from tandem.serving.polling import prepare_grpc

prepare_grpc()  # here, before anything imports gRPC
