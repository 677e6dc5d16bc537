"""The layout as its imports show it."""

from __future__ import annotations

from itertools import chain

import grimp

PACKAGES = (
    "tandem", "tandem_coordinator", "tandem_draft", "tandem_load", "tandem_target",
    "tandem_audit", "tandem_vllm", "benchmarks",
)  # fmt: skip


def test_no_two_modules_import_each_other() -> None:
    """Nor for types alone: a reader of either would have to know both."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200, "the packages were not read"
    pairs = chain.from_iterable(((one, other) for other in found) for one, found in imports.items())
    assert [pair for pair in pairs if pair[0] < pair[1] and pair[0] in imports[pair[1]]] == []
