"""The target service: tells what the target model's distribution is where a proposal reaches."""
