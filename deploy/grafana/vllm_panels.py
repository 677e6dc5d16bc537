"""The dashboard of a vLLM that drafts from Tandem's draft services: vLLM's own metrics beside the plug-in's."""

from __future__ import annotations

from deploy.grafana.parts import Panel, Query, Section, per

_WAIT = "tandem_vllm_wait_seconds"


def _rate(name: str) -> str:
    """A counter's growth a second, over all vLLMs."""
    return f"sum(rate({name}[$__rate_interval]))"


VLLM_SECTIONS = [
    Section(
        "vLLM with Tandem's drafts",
        [
            Panel(
                "Acceptance",
                "Share of the proposed tokens that vLLM accepted, as vLLM itself counts.",
                [
                    Query(
                        per(
                            _rate("vllm:spec_decode_num_accepted_tokens_total"),
                            _rate("vllm:spec_decode_num_draft_tokens_total"),
                        ),
                        "accepted",
                    )
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Accepted tokens for each proposal",
                "One more than this is what a pass of the target brings.",
                [
                    Query(
                        per(
                            _rate("vllm:spec_decode_num_accepted_tokens_total"),
                            _rate("vllm:spec_decode_num_drafts_total"),
                        ),
                        "accepted tokens",
                    )
                ],
            ),
            Panel(
                "Generated tokens",
                "Tokens per second of all requests.",
                [Query(_rate("vllm:generation_tokens_total"), "tokens/s")],
            ),
            Panel(
                "Wait for proposals",
                "Time that a step of vLLM waits for its drafts. It is bounded by what the accepted tokens save.",
                [
                    Query(
                        f"histogram_quantile({share}, sum by (le) (rate({_WAIT}_bucket[$__rate_interval])))",
                        f"p{share * 100:g}",
                    )
                    for share in (0.5, 0.95, 0.99)
                ],
                unit="s",
            ),
            Panel(
                "Drafted ahead",
                "Of the steps that a draft was to work ahead of, the share that it had drafted for. A hit waits for no "
                "draft.",
                [
                    Query(
                        per(_rate("tandem_vllm_hits_total"), _rate("tandem_vllm_awaited_outcomes_total")),
                        "hits",
                    )
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Steps without proposals",
                "Steps that waited in vain, and steps that asked nothing after such waits: the draft is slow, or gone.",
                [
                    Query(
                        per(_rate("tandem_vllm_timed_out_steps_total"), _rate("tandem_vllm_steps_total")),
                        "waited in vain",
                    ),
                    Query(
                        per(_rate("tandem_vllm_paused_steps_total"), _rate("tandem_vllm_steps_total")),
                        "did not ask",
                    ),
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Lost drafts",
                "Times a second that a draft failed a sequence. The sequence goes on with another draft, or without.",
                [Query(_rate("tandem_vllm_lost_drafts_total"), "lost")],
            ),
            Panel(
                "Sequences",
                "Running requests of vLLM, and sequences kept for drafts.",
                [
                    Query("sum(vllm:num_requests_running)", "running requests"),
                    Query("sum(tandem_vllm_sequences)", "kept for drafts"),
                ],
            ),
        ],
    )
]
