"""The demo target with its bundled EAGLE-3 head, served as `tandem up --method eagle3` does."""

from __future__ import annotations

from tandem.types import GenerationRequest
from tests.end_to_end.processes import address_of, coordinator, model_service
from tests.paths import DEMO_EAGLE3, DEMO_TARGET
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

    options = ("--draft-model", str(DEMO_EAGLE3), "--dtype", "float32")
    with (
        model_service("bound_service", DEMO_TARGET, *options) as target,
        coordinator(address_of(target), None, "--rejection-sampling-strategy", "auto") as front,
    ):
        alone = await complete_all(address_of(front), requests(speculation=False))
        drafted = await complete_all(address_of(front), requests(speculation=True))
        assert [front.stop(), target.stop()] == [0, 0]

    assert [each.token_ids for each in drafted] == [each.token_ids for each in alone]
    accepted, proposed = (
        sum(getattr(each.stats, name) for each in drafted) for name in ("accepted", "drafted")
    )
    # It is 0.48 on all prompts; a head that reads wrong states has nearly nothing accepted.
    assert accepted > 0.2 * proposed > 0
