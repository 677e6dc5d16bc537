"""The engine itself: `engine` is called on the event loop, `worker` is the thread that runs the model."""
