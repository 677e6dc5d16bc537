"""Sections of the dashboard on replicas, capacity and trouble."""

from __future__ import annotations

from deploy.grafana.parts import (
    ACCEPTED,
    GREEN,
    RED,
    Panel,
    Query,
    Section,
    counted,
    per,
)

CAPACITY_SECTIONS = [
    Section(
        "Replicas and capacity",
        [
            Panel(
                "Ready replicas",
                "Each replica that the coordinator knows, while it is ready and while it is not.",
                [Query("tandem_replica_ready", "{{role}} {{address}}")],
                kind="state-timeline",
                steps={0: RED, 1: GREEN},
            ),
            Panel(
                "Replicas by state",
                "Draining ones take no new sequences; incompatible ones serve a model that does not fit.",
                [Query("sum by (role, state) (tandem_replicas) > 0", "{{role}} {{state}}")],
                stacked=True,
            ),
            Panel(
                "Open sequences",
                "On each replica: new ones go to the one with the fewest.",
                [Query("sum by (role, address) (tandem_replica_open_sequences)", "{{role}} {{address}}")],
            ),
            Panel(
                "KV cache in use",
                "Reserved of the capacity, in each process. When it is full, sequences wait.",
                [Query("tandem_kv_cache_usage_perc", "{{role}} {{instance}}")],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Requests and queues",
                "Requests at the coordinator, and sequences that wait for a place in a KV cache.",
                [
                    Query('sum(tandem_num_requests_running{model_name=~"$model"})', "running"),
                    Query('sum(tandem_num_requests_waiting{model_name=~"$model"})', "waiting"),
                    Query("sum by (role) (tandem_num_sequences_waiting)", "waiting for {{role}}'s cache"),
                ],
            ),
            Panel(
                "Batch",
                "Mean number of sequences in one forward pass: what a busy target shares its weights among.",
                [
                    Query(
                        "sum by (role) (rate(tandem_engine_batch_sequences_sum[$__rate_interval])) / "
                        "(sum by (role) (rate(tandem_engine_batch_sequences_count[$__rate_interval])) > 0)",
                        "{{role}}",
                    )
                ],
            ),
            Panel(
                "Step of a model",
                "Mean time of one forward pass.",
                [
                    Query(
                        "sum by (role) (rate(tandem_engine_step_seconds_sum[$__rate_interval])) / "
                        "(sum by (role) (rate(tandem_engine_step_seconds_count[$__rate_interval])) > 0)",
                        "{{role}}",
                    )
                ],
                unit="s",
            ),
            Panel(
                "Step seen by the coordinator",
                "Moving average of a step, the network and the wait for the model included.",
                [
                    Query("tandem_replica_step_seconds", "{{role}} {{address}}"),
                    Query("tandem_replica_round_trip_seconds", "{{role}} {{address}} round trip"),
                ],
                unit="s",
            ),
            Panel(
                "Bytes for each accepted token",
                "On the wire, between the coordinator and the services. Dense rows cost half a megabyte each.",
                [Query(per(counted("tandem_wire_bytes_total"), counted(f"{ACCEPTED}_total")), "bytes")],
                unit="bytes",
            ),
        ],
    ),
    Section(
        "Trouble",
        [
            Panel(
                "Without a draft",
                "Times that the target went on alone: the draft was lost, late, or paused because it did not pay.",
                [Query("sum by (kind) (increase(tandem_fallbacks_total[$__rate_interval]))", "{{kind}}")],
            ),
            Panel(
                "Failovers",
                "Sequences that lost their replica, and those that found another.",
                [Query("sum by (kind) (increase(tandem_failovers_total[$__rate_interval]))", "{{kind}}")],
            ),
            Panel(
                "Requests by outcome",
                "stop and length are completions; the rest did not end by themselves.",
                [Query(f"{counted('tandem_requests_total', by=' by (outcome) ')} > 0", "{{outcome}}")],
                stacked=True,
            ),
        ],
    ),
]
