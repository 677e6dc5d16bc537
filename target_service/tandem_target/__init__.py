"""The target service: sends rows of the target model's distribution for a proposal's positions."""

from tandem.serving.polling import prepare_grpc

prepare_grpc()  # here, before anything imports gRPC
