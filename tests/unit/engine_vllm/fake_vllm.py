"""A vLLM without a model: a block manager and a worker whose logits depend on what lies in the blocks, and where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tandem.engine_vllm.step import Part, RoundEnd, Step

BLOCK_TOKENS = 4
VOCABULARY_SIZE = 50
STATE_SLOTS = 4
"""States that recurrent layers keep of a step."""


def expected_logits(token_ids: SequenceOf[int]) -> Tensor:
    """The logits after the last token, [vocabulary_size]: a function of all tokens."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(state))


class FakeManager:
    """Gives blocks as vLLM's `KVCacheManager` does, for one group of layers that keeps all tokens."""

    def __init__(self, block_count: int, max_length: int = 64, *, drops_last: bool = False) -> None:
        """`drops_last`: a head reads the last known block again, as its last pair is another's."""
        self.max_model_len = max_length
        self.drops_last = drops_last
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS))
        self.kv_cache_config = SimpleNamespace(
            num_blocks=block_count + 1, kv_cache_groups=[group], needs_kv_cache_zeroing=False
        )
        self.free_blocks: OrderedDict[int, None] = OrderedDict(
            (each, None) for each in range(1, block_count + 1)
        )
        self.by_hash: dict[Any, int] = {}
        self.holders: dict[int, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.block_pool = SimpleNamespace(
            get_num_free_blocks=lambda: len(self.free_blocks),
            cached_block_hash_to_block=self.by_hash,
            hash_block_size=BLOCK_TOKENS,
        )

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        found: list[int] = []
        for each in request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
            if each not in self.by_hash:
                break
            found.append(self.by_hash[each])
        if self.drops_last:
            del found[-1:]
        return found, len(found) * BLOCK_TOKENS, 0

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        *,
        num_lookahead_tokens: int,
        num_new_computed_tokens: int,
        new_computed_blocks: list[int] | None,
        delay_cache_blocks: bool,
        full_sequence_must_fit: bool,
    ) -> object:
        assert delay_cache_blocks
        own = self.blocks.setdefault(request.request_id, [])
        known = new_computed_blocks or []
        taken = [each for each in known if each in self.free_blocks]
        computed = request.num_computed_tokens + num_new_computed_tokens
        needed = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        tokens = max(needed, request.num_tokens if full_sequence_must_fit else 0)
        if -(-tokens // BLOCK_TOKENS) - len(own) - len(known) + len(taken) > len(self.free_blocks):
            return None
        for each in known:
            self._take(each)
        own += known
        while len(own) * BLOCK_TOKENS < needed:
            block = next(iter(self.free_blocks))
            self.evict_blocks({block})
            self._take(block)
            own.append(block)
        return own

    def _take(self, block: int) -> None:
        self.free_blocks.pop(block, None)
        self.holders[block] = self.holders.get(block, 0) + 1

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        count = num_computed_tokens // BLOCK_TOKENS
        for each, block in zip(
            request.block_hashes[:count], self.blocks[request.request_id][:count], strict=True
        ):
            if block not in self.by_hash.values():
                self.by_hash.setdefault(each, block)

    def free(self, request: Any) -> None:
        for block in reversed(self.blocks.pop(request.request_id, [])):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free_blocks[block] = None

    def evict_blocks(self, block_ids: set[int]) -> None:
        for each in [known for known, block in self.by_hash.items() if block in block_ids]:
            del self.by_hash[each]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(self.blocks[request_id]),)

    def take_new_block_ids(self) -> list[int]:
        return []


def hashes(request: Any) -> list[Any]:
    """Those that the request lacks, as vLLM's hasher: each of the salt and of all tokens up to the block's end."""
    full = request.num_tokens // BLOCK_TOKENS
    return [
        (request.cache_salt, *request.all_token_ids[: (index + 1) * BLOCK_TOKENS])
        for index in range(len(request.block_hashes), full)
    ]


@dataclass
class FakeWorker:
    """Runs steps as the worker does: it writes tokens to blocks, and reads all of them from there."""

    spoil: Callable[[Step], None] = lambda _: None
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    last: list[Part] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    drafts_by_itself: bool = True

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, method)(*args)]

    def tandem_step(self, step: Step) -> None:
        self.spoil(step)
        for request_id in step.finished_ids:
            self.tokens.pop(request_id, None)
            self.blocks.pop(request_id, None)
        rows = []
        for part in step.parts:
            assert part.is_new == (part.request_id not in self.tokens)
            tokens = self.tokens.setdefault(part.request_id, [])
            blocks = self.blocks.setdefault(part.request_id, [])
            assert part.first <= min(part.start, len(tokens))
            tokens[part.first :] = part.token_ids
            for group in part.block_ids:
                blocks += group
            places = [(blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(part.end)]
            for at in range(part.start, part.end):
                self.memory[places[at]] = tokens[at]
            read = [self.memory[place] for place in places]
            assert read == tokens[: part.end], "a block was written to that others hold, or was not written"
            rows += [expected_logits(read[: part.end - i]) for i in reversed(range(part.row_count))]
            self.step_ran(part, places, list(tokens))
            del tokens[part.end - part.draft_count :]  # a proposal is no part of the sequence
        self.logits = torch.stack(rows) if rows else torch.empty(0, VOCABULARY_SIZE)
        self.last = list(step.parts)

    def step_ran(self, part: Part, places: list[tuple[int, int]], token_ids: list[int]) -> None:
        """A part of a step has run; its tokens with the proposal lie at these places."""

    def tandem_drafts_by_itself(self) -> bool:
        return self.drafts_by_itself

    def tandem_draft(self, begin: Callable[..., Any], payload: Any, counts: SequenceOf[int]) -> Any:
        """As the worker, over the memory: what is drawn is written where the sequence has a place for it."""
        drafted = [part for part in self.last if part.row_count]
        draws = begin(payload, self.logits, counts)
        logits = self.logits
        for depth in range(max(counts)):
            token_ids = draws.draw(logits).tolist()
            if depth + 1 == max(counts):
                break
            rows = []
            for part, count, token_id in zip(drafted, counts, token_ids, strict=True):
                blocks = self.blocks[part.request_id]
                length = part.end + min(depth + 1, count - 1)
                places = [(blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(length)]
                if depth + 1 < count:
                    self.memory[places[-1]] = token_id
                rows.append(expected_logits([self.memory[place] for place in places]))
            logits = torch.stack(rows)
        return draws.read()

    def tandem_apply(self, function: Callable[[Any, Tensor], Any], payload: Any) -> Any:
        return function(payload, self.logits)


@dataclass
class FakeRecurrentWorker(FakeWorker):
    """A worker with recurrent layers, which keep the state behind each token of a verification as vLLM's do."""

    states: dict[str, list[list[int]]] = field(default_factory=dict)
    """Tokens of which each kept state is, by request."""

    def step_ran(self, part: Part, places: list[tuple[int, int]], token_ids: list[int]) -> None:
        """See `FakeWorker`."""
        if part.start:
            kept = self.states[part.request_id][max(part.kept_states, 1) - 1]
            assert kept == token_ids[: part.start], "the step goes on from the state of other tokens"
        ends = [part.end]
        if part.kept_states:
            assert part.draft_count == part.end - part.start - 1 < STATE_SLOTS
            ends = list(range(part.start + 1, part.end + 1))
        self.states[part.request_id] = [token_ids[:end] for end in ends]


@dataclass
class FakeHeadWorker(FakeWorker):
    """With a head, whose pairs lie in the blocks beside the tokens: each depends on all tokens up to the one behind
    its own. It proposes what the target will say, if its pairs are those of the sequence, and otherwise nonsense."""

    max_length: int = 64
    pairs: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    left: list[tuple[Part, list[int]]] = field(default_factory=list)
    shares_blocks: bool = False
    """Sequences share what they read. A block's last pair holds a token of the next block, so it may be another's, as
    in vLLM: no hash tells."""
    stale_count: int = 0
    """Proposals behind pairs that are not the sequence's."""
    proposed_count: int = 0
    read_count: int = 0
    """Steps that the head has read."""

    def tandem_step(self, step: Step) -> None:
        self.left = []
        super().tandem_step(step)

    def step_ran(self, part: Part, places: list[tuple[int, int]], token_ids: list[int]) -> None:
        self.left.append((part, token_ids))

    def tandem_propose(self, ends: SequenceOf[RoundEnd], count: int) -> list[list[int]]:
        left = self.left
        self.left = []
        self.read_count += 1
        return [self._read(*each, end, count) for each, end in zip(left, ends, strict=True)]

    def _read(self, part: Part, token_ids: list[int], end: RoundEnd, count: int) -> list[int]:
        following = [*token_ids[1:], -1]
        kept_length = part.end - part.draft_count + end.accepted_count
        following[kept_length - 1] = -1 if end.next_token_id is None else end.next_token_id
        for at in range(part.start, part.end):
            self.pairs[self._place(part, at)] = (*token_ids[: at + 1], following[at])
        text = [*token_ids[:kept_length], following[kept_length - 1]]
        proposal: list[int] = []
        if count and end.next_token_id is not None:
            self.stale_count += any(
                self.pairs.get(self._place(part, at)) != tuple(text[: at + 2])
                for at in range(kept_length)
                if not (self.shares_blocks and at % BLOCK_TOKENS == BLOCK_TOKENS - 1)
            )
            self.proposed_count += 1
            for _ in range(count):
                proposal.append(int(expected_logits([*text, *proposal]).argmax()))
            if sum(text) % 3 == 0:
                proposal[-1] ^= 1
        for at in range(kept_length, min(kept_length + max(count - 1, 0), self.max_length)):
            self.pairs[self._place(part, at)] = ()
        return proposal

    def _place(self, part: Part, at: int) -> tuple[int, int]:
        return self.blocks[part.request_id][at // BLOCK_TOKENS], at % BLOCK_TOKENS

    def tandem_time_head(self, sequences: int) -> float:
        return 0.001 * sequences


def fake_core(
    worker: FakeWorker, block_count: int = 200, max_length: int = 64, *, proposes: bool = True
) -> Any:
    """A stand-in for the result of `tandem.engine_vllm.adapter.load_core`. `proposes`: what has rows of its own is a
    proposal to the worker."""
    manager = FakeManager(block_count, max_length, drops_last=isinstance(worker, FakeHeadWorker))
    return SimpleNamespace(
        engine=SimpleNamespace(request_block_hasher=hashes, shutdown=lambda: None),
        config=SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCABULARY_SIZE,
                max_model_len=max_length,
                dtype=torch.float32,
                is_hybrid=isinstance(worker, FakeRecurrentWorker),
            ),
            device_config=SimpleNamespace(device_type="cpu"),
            speculative_config=object() if proposes else None,
            num_lookahead_tokens=4,
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        ),
        executor=worker,
        manager=manager,
        is_attention=lambda spec: True,
        recurrent_kinds=lambda spec: {"MAMBA2"} if isinstance(worker, FakeRecurrentWorker) else set(),
        state_slots=lambda spec: STATE_SLOTS if isinstance(worker, FakeRecurrentWorker) else 0,
        sees_all=lambda spec: True,
        running="running",
        has_one_process=True,
    )
