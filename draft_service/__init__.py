"""The draft service: proposes tokens that a target model is likely to say next."""
