"""From a call to its stream of chunks: admission, validation, the plan, the running request, its deadline."""
