"""From a call to its stream of chunks: admission, validation, the plan, the running request, its deadline.

Imported by `admin`, `http` and the servicer; imports everything below: `failover`, `replicas`, `decoding`.
"""
