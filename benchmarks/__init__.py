"""Measurements, and the commands that repeat them."""

from tandem.serving.polling import prepare_grpc

prepare_grpc()  # here, before anything imports gRPC: the client waits as the services do
