"""`python -m benchmarks.studies.hits`: how often the outcome of a verification had been drafted for.

No clock: each round waits until all outcomes are drafted, so that the figures are the pair's and not the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.models.pairs import open_pair
from coordinator.decoding.tokenization import PromptEncoder
from coordinator.rejection.rows import draft_support
from coordinator.requests.plan import Models, Plan, make_plan
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.transport.draft_client import PendingOutcomes
from draft_service.proposers.standalone import StandaloneProposer, StandaloneSequence, load_standalone
from draft_service.settings import DraftSettings
from tandem.types import (
    AheadBudget,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    GenerationRequest,
    Proposal,
    ProposeStep,
    RowKind,
    TargetOptions,
    VerifyStep,
)
from target_service.settings import TargetSettings
from target_service.verifier import Verifier, load_verifier

_QUIET_SECONDS = 1.0
"""Nothing more comes after so long."""


@dataclass
class Counts:
    """Rounds of one setting."""

    rounds: int = 0
    hits: list[int] = field(default_factory=lambda: [0] * 64)
    """By the place of the outcome that came."""
    committed: int = 0
    pushed_bytes: int = 0

    def add(self, drafted: Proposal | None) -> None:
        """Count a round, with what had been drafted for its outcome."""
        self.rounds += 1
        if drafted is not None and drafted.outcome_rank is not None:
            self.hits[drafted.outcome_rank] += 1

    def share(self, branch_count: int) -> float:
        """Share of the rounds whose outcome was among the first `branch_count`."""
        return sum(self.hits[:branch_count]) / max(self.rounds, 1)


class Pair:
    """A draft and a target in this process."""

    def __init__(self, folder_of_draft: Path, folder_of_target: Path) -> None:
        self.draft: StandaloneProposer = load_standalone(DraftSettings(model=folder_of_draft, threads=1))
        self.target: Verifier = load_verifier(TargetSettings(model=folder_of_target, threads=1))
        self.tokenizer = Tokenizer.from_file(str(folder_of_target / "tokenizer.json"))

    async def count(
        self,
        prompt: Sequence[int],
        settings: CoordinatorSettings,
        budget: AheadBudget,
        request: GenerationRequest,
    ) -> Counts:
        """Complete one prompt, and count what was drafted for."""
        models = Models(self.target.model_info, self.draft.model_info, PromptEncoder(self.tokenizer))
        plan = await make_plan(request, "hits", settings, models)
        counts, completion = Counts(), plan.begin(self.tokenizer)
        max_length = len(prompt) + plan.limits.max_tokens
        draft_options = DraftOptions(
            "hits",
            plan.sampling,
            max_length,
            plan.rule.strategy.draft_row_kind,
            plan.draft_top_k,
            ahead=budget,
        )
        target_options = TargetOptions("hits", plan.sampling, max_length, prompt_length=len(prompt))
        async with (
            self.draft.sequence(draft_options) as drafted,
            self.target.sequence(target_options) as verified,
        ):
            while completion.can_extend and completion.room > plan.num_speculative_tokens + 1:
                tokens = tuple(completion.token_ids)
                step = ProposeStep(Delta(0, tokens), plan.num_speculative_tokens, budget)
                proposal = await drafted.propose(step)
                assert proposal is not None
                pending = PendingOutcomes(self.target.model_info.vocabulary_size, draft_options.row_kind)
                pending.expect(len(tokens), proposal.token_ids, budget)
                await _filled(drafted, pending, budget, counts)
                asked = _verify_step(plan, (*tokens, *proposal.token_ids), proposal)
                acceptance = plan.accept(completion, proposal, await verified.verify(asked))
                counts.committed += len(completion.extend(proposal, acceptance).token_ids)
                if completion.can_extend:
                    counts.add(pending.find(completion.token_ids))
        return counts


def _verify_step(plan: Plan, token_ids: Sequence[int], proposal: Proposal) -> VerifyStep:
    kind = plan.rule.row_kind(None)
    is_raced = kind is RowKind.SUPPORT
    supports = [draft_support(proposal, i) for i in range(len(proposal))] if is_raced else []
    return VerifyStep(
        Delta(0, tuple(token_ids)),
        kind,
        len(proposal) + 1,
        tuple(support for support in supports if support is not None),
        raced_recovery=is_raced,
    )


async def _filled(
    drafted: StandaloneSequence, pending: PendingOutcomes, budget: AheadBudget, counts: Counts
) -> None:
    assert drafted.pushed is not None
    for _ in range(budget.token_count):
        try:
            pushed = await asyncio.wait_for(drafted.pushed.get(), _QUIET_SECONDS)
        except TimeoutError:
            return  # the last branches were given up
        assert isinstance(pushed, DraftedOutcomes), pushed
        pending.add(pushed)
        counts.pushed_bytes += sum(8 * len(each.token_ids) for each in pushed.distributions)
        counts.pushed_bytes += 2 * (len(pushed.token_ids) + len(pushed.accepted_counts) * 2)


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    models = Pair(pair.draft, pair.target)
    await models.target.start()
    await models.draft.start()
    budget = AheadBudget(options.branches, options.tokens)
    prompts = pair.prompts()[: options.prompts]
    sizes = [count for count in (1, 2, 4, 8, 16, 32) if count <= options.branches]
    _say(f"| rule, temperature | rounds | tokens a round | {' | '.join(map(str, sizes))} | KB a round |")
    for rule, temperature in options.settings:
        settings = CoordinatorSettings(
            target_address="127.0.0.1:1",
            num_speculative_tokens=options.tokens,
            rejection_sampling_strategy=rule or None,
            speculation_policy="fixed",
        )
        total = Counts()
        for seed, prompt in enumerate(prompts):
            request = GenerationRequest(
                tuple(prompt),
                max_tokens=options.max_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=True,
            )
            counts = await models.count(prompt, settings, budget, request)
            total.rounds += counts.rounds
            total.committed += counts.committed
            total.pushed_bytes += counts.pushed_bytes
            total.hits = [a + b for a, b in zip(total.hits, counts.hits, strict=True)]
        shares = " | ".join(f"{total.share(size):.2f}" for size in sizes)
        _say(
            f"| {rule or 'greedy'}, {temperature:g} | {total.rounds} | {total.committed / max(total.rounds, 1):.2f} | "
            f"{shares} | {total.pushed_bytes / max(total.rounds, 1) / 1e3:.1f} |",
        )
    await models.target.close()
    await models.draft.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _settings(text: str) -> list[tuple[str, float]]:
    return [(part.split("@")[0], float(part.split("@")[1])) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.hits", description=__doc__)
    parser.add_argument("--pair", default="demo", help="as for tandem bench")
    parser.add_argument("--tokens", type=int, default=4, help="K")
    parser.add_argument("--branches", type=int, default=16, help="B")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--settings",
        type=_settings,
        default=_settings("@0,strict@0.7,strict@1,residual@0.7,residual@1,block@1"),
        help="RULE@TEMPERATURE, several with commas",
    )
    parser.add_argument("--cache-folder", type=Path, default=Path.home() / ".cache" / "tandem" / "bench")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
