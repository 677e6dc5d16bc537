"""The admin service: what operators see and steer."""
