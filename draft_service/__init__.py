"""The draft service: proposes tokens that a target model is likely to produce next."""

from tandem.serving.polling import wait_in_one_thread

wait_in_one_thread()  # here, before anything imports gRPC
