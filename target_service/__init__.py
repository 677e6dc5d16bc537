"""The target service: tells what the target model's distribution is where a proposal reaches."""

from tandem.serving.polling import wait_in_one_thread

wait_in_one_thread()  # here, where nothing has imported gRPC yet
