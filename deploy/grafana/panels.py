"""Content of the dashboard: sections of panels, each with its queries and a sentence on how to read it."""

from __future__ import annotations

from deploy.grafana.capacity_panels import CAPACITY_SECTIONS
from deploy.grafana.parts import (
    ACCEPTED,
    AHEAD_AWAITED,
    AHEAD_HITS,
    AHEAD_SAVED,
    BY_POSITION,
    DRAFTED,
    DRAFTS,
    GREEN,
    ORANGE,
    PHASES,
    PLAIN,
    REACHED,
    RED,
    ROUNDS,
    TOKENS,
    Panel,
    Query,
    Section,
    acceptance_rate,
    counted,
    per,
    quantile,
    quantiles,
    speed_up,
    stat,
    tokens_per_verification,
)

SECTIONS = [
    Section(
        "Does speculation pay?",
        [
            stat(
                "Acceptance rate",
                "Accepted of the proposed tokens. Below one half, propose fewer tokens or take a draft that knows the "
                "target better.",
                acceptance_rate("1m"),
                "percentunit",
                {0: RED, 0.3: ORANGE, 0.5: GREEN},
            ),
            stat(
                "Tokens per pass, drafted",
                "Of passes that had a proposal to verify: its accepted tokens, and the one that the target supplies. "
                "vLLM calls this the mean acceptance length.",
                tokens_per_verification("1m"),
                "short",
                {0: RED, 1.5: ORANGE, 2: GREEN},
            ),
            stat(
                "Speed-up, estimated",
                "Tokens a round, times the share of a round that the target takes. It counts a verification as long as "
                "a step of the target alone, so it is a little high. Below 1, speculation costs more than it gives.",
                speed_up("1m"),
                "x",
                {0: RED, 1: ORANGE, 1.2: GREEN},
            ),
            stat("Tokens a second", "Sent to clients.", counted(TOKENS, window="1m"), "short", {0: PLAIN}),
            stat(
                "Time to first token",
                "Half of the requests have their first token within this time.",
                quantile(0.5, "tandem_time_to_first_token_seconds", "1m"),
                "s",
                {0: PLAIN},
            ),
            stat(
                "Requests waiting",
                "For a place at the coordinator.",
                'sum(tandem_num_requests_waiting{model_name=~"$model"})',
                "short",
                {0: GREEN, 1: ORANGE, 32: RED},
            ),
        ],
    ),
    Section(
        "Acceptance",
        [
            Panel(
                "Acceptance rate",
                "Accepted of the proposed tokens, for all and for each acceptance rule.",
                [
                    Query(acceptance_rate(), "all"),
                    Query(
                        per(
                            counted(f"{ACCEPTED}_total", by=" by (rule) "),
                            counted(f"{DRAFTED}_total", by=" by (rule) "),
                        ),
                        "{{rule}}",
                    ),
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Acceptance length",
                "Accepted tokens for each verification, with a proposal or without (MAX's acceptance length). Beside "
                "it what was proposed where there was a proposal, and the tokens of such a pass: where these are far "
                "above one more than the acceptance length, many rounds go without a draft.",
                [
                    Query(per(counted(f"{ACCEPTED}_total"), counted(ROUNDS)), "acceptance length"),
                    Query(tokens_per_verification(), "tokens per pass, drafted"),
                    Query(per(counted(f"{DRAFTED}_total"), counted(DRAFTS)), "proposed tokens"),
                ],
            ),
            Panel(
                "Tokens proposed",
                "What is rejected was computed for nothing. When it is the larger part, propose fewer tokens.",
                [
                    Query(counted(f"{ACCEPTED}_total"), "accepted"),
                    Query(f"{counted(f'{DRAFTED}_total')} - {counted(f'{ACCEPTED}_total')}", "rejected"),
                ],
                stacked=True,
            ),
            Panel(
                "By position, cumulative",
                "Of the tokens proposed at each position, the share that was accepted. Positions far below the first "
                "are not worth proposing.",
                [
                    Query(
                        per(
                            counted(f"{ACCEPTED}_per_pos_total", by=BY_POSITION, window="1m"),
                            counted(f"{DRAFTED}_per_pos_total", by=BY_POSITION, window="1m"),
                        ),
                        "position {{position}}",
                    )
                ],
                kind="bargauge",
                unit="percentunit",
                top=1,
                height=7,
            ),
            Panel(
                "By position, given all before",
                "Of the tokens whose predecessors were all accepted, the share that was. Level bars: the draft is as "
                "good at each position, and only the product falls.",
                [
                    Query(
                        per(
                            counted(f"{ACCEPTED}_per_pos_total", by=BY_POSITION, window="1m"),
                            counted(f"{REACHED}_per_pos_total", by=BY_POSITION, window="1m"),
                        ),
                        "position {{position}}",
                    )
                ],
                kind="bargauge",
                unit="percentunit",
                top=1,
                height=7,
            ),
            Panel(
                "Acceptance rate by draft replica",
                "One that differs from the others serves another model or another configuration.",
                [
                    Query(
                        per(
                            counted(
                                "tandem_replica_accepted_tokens_total", ', role="draft"', " by (address) "
                            ),
                            counted("tandem_replica_draft_tokens_total", ', role="draft"', " by (address) "),
                        ),
                        "{{address}}",
                    )
                ],
                unit="percentunit",
                top=1,
                height=7,
            ),
        ],
    ),
    Section(
        "Speed",
        [
            Panel("Tokens a second", "Sent to clients.", [Query(counted(TOKENS), "tokens")]),
            Panel(
                "Speed-up, estimated",
                "Against the target alone; 1 is where speculation neither gives nor costs. See the number above.",
                [Query(speed_up(), "speed-up"), Query("vector(1)", "the target alone")],
                unit="x",
            ),
            Panel(
                "Round by phase",
                "Mean time of a round, and where it goes: asking the draft, asking the target, the acceptance rule, "
                "and between rounds.",
                [
                    Query(
                        f"{counted(f'{PHASES}_sum', by=' by (phase) ')} "
                        f"/ ignoring(phase) group_left () ({counted(ROUNDS)} > 0)",
                        "{{phase}}",
                    )
                ],
                unit="s",
                stacked=True,
            ),
            Panel(
                "Drafted ahead",
                "Of the rounds whose proposal was to be drafted during the verification before them, the share that "
                "found it: for any outcome, and for the outcome that the draft drafted for first. A hit waits for no "
                "draft.",
                [
                    Query(per(counted(AHEAD_HITS), counted(AHEAD_AWAITED)), "hits"),
                    Query(
                        per(counted(AHEAD_HITS, ', rank="1"'), counted(AHEAD_AWAITED)),
                        "hits of the first outcome",
                    ),
                    Query(
                        per(counted(AHEAD_SAVED), counted(f"{PHASES}_sum")),
                        "time saved, of the time of rounds",
                    ),
                ],
                unit="percentunit",
                top=1,
            ),
            Panel(
                "Time to first token",
                "From a request's arrival; the wait for a place included.",
                quantiles("tandem_time_to_first_token_seconds"),
                unit="s",
            ),
            Panel(
                "Inter-token latency",
                "Between two pieces of a completion; with speculation a piece holds several tokens.",
                quantiles("tandem_inter_token_latency_seconds"),
                unit="s",
            ),
            Panel(
                "Time per output token",
                "Of a whole request, after its first token.",
                quantiles("tandem_request_time_per_output_token_seconds"),
                unit="s",
            ),
        ],
    ),
    *CAPACITY_SECTIONS,
]
