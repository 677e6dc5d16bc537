"""Where a load comes from: Tandem's gRPC client, or OpenAI's API over HTTP.

Imported by `benchmarks.load`, whose `figures` it fills."""
