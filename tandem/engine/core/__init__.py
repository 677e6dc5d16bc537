"""The engine itself: what the services call, and the thread that runs the model."""
