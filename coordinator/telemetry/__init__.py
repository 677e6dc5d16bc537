"""What the coordinator tells of its requests, in traces and metrics. Importing this costs nothing."""
