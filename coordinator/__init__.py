"""The coordinator: joins a draft service and a target service into one stream of text. Read `generate` first."""

from tandem.serving.polling import wait_in_one_thread

wait_in_one_thread()  # here, before anything imports gRPC
