"""Findings of the doctor about CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.admin import Finding, Severity
from tandem.plural import plural
from tandem.replica import ReplicaSnapshot

_MAX_REASONS = 3


def graphs(replica: ReplicaSnapshot) -> Iterator[Finding]:
    """Find which sizes of step a service could not capture; nothing where it captures none."""
    captures = None if replica.model is None else replica.model.captures
    if captures is None:
        return
    count, missing = captures.captured_count, captures.missing
    memory = f"{captures.memory_bytes / 2**30:.1f} GiB"
    if not missing:
        words = f"all {plural(count, 'size')} captured, {memory}"
        yield Finding("cuda graphs", replica.address, Severity.OK, words)
        return
    reasons = "; ".join(missing[:_MAX_REASONS])
    more = f"; {len(missing) - _MAX_REASONS} more in its log" if len(missing) > _MAX_REASONS else ""
    yield Finding(
        "cuda graphs",
        replica.address,
        Severity.WARNING,
        f"{count} of {plural(count + len(missing), 'size')} captured, {memory}; not {reasons}{more}",
        "steps of these sizes run eagerly; for want of memory, lower --device-memory-utilization or --max-sequences",
    )
