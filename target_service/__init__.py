"""The target service: sends rows of the target model's distribution for a proposal's positions."""

from tandem.serving.polling import wait_in_one_thread

wait_in_one_thread()  # here, before anything imports gRPC
