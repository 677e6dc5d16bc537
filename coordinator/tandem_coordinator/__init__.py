"""The coordinator: joins a draft service and a target service into one stream of text. Read `generate` first."""

from tandem.serving.polling import prepare_grpc

prepare_grpc()  # here, before anything imports gRPC
