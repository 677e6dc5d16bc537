"""The demo target with its bundled EAGLE-3 head, as `tandem up --method eagle3` starts it."""

from __future__ import annotations

from tandem.types import GenerationRequest
from tests.end_to_end.processes import TANDEM, running
from tests.service.clients import complete_all

PROMPTS = 3
MAX_TOKENS = 32


async def test_the_bundled_head_drafts_and_the_text_is_the_targets_own(prompts: list[str]) -> None:
    def requests(*, speculation: bool) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                prompt,
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                num_speculative_tokens=4,
                speculation=speculation,
                ignore_eos=True,
            )
            for prompt in prompts[:PROMPTS]
        ]

    options = ("--port", "0", "--no-http", "--dtype", "float32", "--threads", "1")
    fixed = {"TANDEM_COORDINATOR_SPECULATION_POLICY": "fixed"}
    with running(TANDEM, "up", "--method", "eagle3", *options, environment=fixed) as cluster:
        address = cluster.line("ready on ")
        alone = await complete_all(address, requests(speculation=False))
        drafted = await complete_all(address, requests(speculation=True))
        assert cluster.stop() == 0, cluster.story

    assert [each.token_ids for each in drafted] == [each.token_ids for each in alone]
    accepted, proposed = (
        sum(getattr(each.stats, name) for each in drafted) for name in ("accepted", "drafted")
    )
    # It is 0.48 on all prompts; a head that reads wrong states has nearly nothing accepted.
    assert accepted > 0.2 * proposed > 0
