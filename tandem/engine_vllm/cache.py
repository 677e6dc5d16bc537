"""Places of sequences in vLLM's KV cache, by its own block manager: prefix cache, windows and groups of layers are its.

Our sequences roll back, which its requests never do. What is rolled back lies in blocks of the sequence's own and is
written again. A block becomes known to others once the sequence has gone on behind it; a sequence that rolls back into
such a block, or before a window's blocks, gives its blocks back and begins anew, from what the prefix cache has of it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from tandem.engine.interface import KvUsage
from tandem.engine.kv_cache.arena import CacheShape
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.steps import BranchStep
from tandem.engine_vllm.step import Part, Step

if TYPE_CHECKING:
    from tandem.engine_vllm.heads import VllmHeads

_numbers = count(1)
_WITH_PAIRS = " with a head's pairs"
"""Behind a scope: blocks in which a head finds what it has read."""


@dataclass(slots=True, eq=False)
class BlockRequest:
    """Members that vLLM's block manager reads of its requests."""

    request_id: str
    all_token_ids: list[int]
    """The sequence's own list."""
    status: Any
    num_computed_tokens: int = 0
    num_tokens: int = 0
    """Number of tokens that are certain."""
    block_hashes: list[Any] = field(default_factory=list)
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    mm_features: tuple[()] = ()
    lora_request: None = None
    cache_salt: str | None = None
    """Part of the hash of its first block, and so of all."""
    prompt_embeds: None = None
    session_id: None = None

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens are prompt to vLLM, which samples none."""
        return self.num_tokens


@dataclass(slots=True, eq=False)
class _Held:
    request: BlockRequest
    capacity: int = 0
    """Tokens that have a place or had one."""
    published: int = 0
    """Tokens in blocks that are known to others, and never written to again."""
    shortest: int = 0
    """Fewest computed tokens after which the next one still sees all that its windows want."""
    sent: tuple[int, ...] | None = None
    """Number of blocks that the workers know, for each group of layers; None before the first step."""
    sent_tokens: int = 0
    """Number of its tokens that the workers know."""
    sent_capacity: int = 0
    """`capacity` at that time."""
    first_state: int = 0
    """Number of tokens behind which recurrent layers have the first state that they kept of the last step."""
    state_count: int = 0
    """Number of states that they kept, behind one token more each."""


@dataclass(slots=True, eq=False)
class BlockCache:
    """See `SequenceCache`. Also writes down steps for the workers, since it knows what they know."""

    manager: Any
    """vLLM's `KVCacheManager`."""
    block_tokens: int
    """Tokens of a block; of the smallest, where groups of layers differ."""
    hasher: Callable[[Any], list[Any]] | None
    running: Any
    """vLLM's state of a request that has begun."""
    has_windows: bool = field(kw_only=True)
    """Some layers see the last tokens only."""
    heads: VllmHeads | None = field(default=None, kw_only=True)
    """Read what steps leave; None: nobody does."""
    lookahead: int = field(default=0, kw_only=True)
    """Tokens behind a step's for which the heads need room, or what a draft draws in a row."""
    state_slots: int = field(default=0, kw_only=True)
    """Tokens of a step behind each of which recurrent layers can keep a state; 0 without such layers."""
    sends_proposals: bool = field(default=True, kw_only=True)
    """To the workers tokens with rows of their own are a proposal; otherwise they are certain."""
    _held: dict[Sequence, _Held] = field(default_factory=dict, init=False)
    _branches: dict[Sequence, list[Sequence]] = field(default_factory=dict, init=False)
    _finished: list[str] = field(default_factory=list, init=False)
    _preemption_count: int = field(default=0, init=False)

    @property
    def shape(self) -> CacheShape:
        """How the cache is divided. Its manager keeps the tables, so that sequences have an empty one of their own."""
        config = self.manager.kv_cache_config
        return CacheShape(self.block_tokens, config.num_blocks - 1, len(config.kv_cache_groups), (None,))

    @property
    def holders(self) -> list[Sequence]:
        """See `SequenceCache`: branches are a matter of their sequence."""
        branches = {branch for each in list(self._branches.values()) for branch in each}
        return [sequence for sequence in list(self._held) if sequence not in branches]

    def usage(self) -> KvUsage:
        shape = self.shape
        held = shape.page_count - self.manager.block_pool.get_num_free_blocks()
        kept = len(self.manager.block_pool.cached_block_hash_to_block) - sum(
            each.published // self.block_tokens for each in list(self._held.values())
        )

        def tokens(blocks: int) -> int:
            return max(blocks, 0) * self.block_tokens // shape.group_count

        return KvUsage(
            total_tokens=tokens(shape.page_count),
            reserved_tokens=tokens(held),
            used_tokens=sum(sequence.computed_length for sequence in self.holders),
            retained_tokens=tokens(min(kept, shape.page_count - held)),
            preemption_count=self._preemption_count,
        )

    def check_rows(self, sequence: Sequence, row_count: int) -> None:
        """See `SequenceCache`: vLLM serves no length for which the cache is too small."""

    def reuse(self, sequence: Sequence, row_count: int = 0, known_hashes: SequenceOf[Any] = ()) -> None:
        """See `SequenceCache`. Every job begins here, so that a sequence that cannot go on begins anew.

        Args:
            known_hashes: Those of its first blocks. Each is computed from the one before it, so those of a long text
                take milliseconds.
        """
        self.trim(sequence)
        sequence.keeps_rows_apart = self.state_slots > 0
        held = self._held.get(sequence)
        if self.heads is not None and not (self.has_windows or self.state_slots):
            # Computed once more where a head has not read it. With windows or recurrent layers that could be much.
            known = self.heads.wanted_length(sequence)
            if known is not None and known < sequence.computed_length:
                sequence.computed_length = known
        if held is not None:
            if self._can_go_on(sequence, held):
                return
            self._let_go(sequence)
            sequence.restart()
        name = f"{sequence.serial}.{next(_numbers)}"
        salt = sequence.scope
        if self.heads is not None and self.heads.has_pairs(sequence):
            salt += _WITH_PAIRS
        request = BlockRequest(name, sequence.token_ids, self.running, cache_salt=salt or None)
        self._held[sequence] = held = _Held(request)
        if self.hasher is None or sequence.is_private:
            return
        request.num_tokens = sequence.length - row_count + 1  # the manager leaves one token to be computed
        request.block_hashes.extend(known_hashes)
        request.block_hashes.extend(self.hasher(request))
        blocks, length, _ = self.manager.get_computed_blocks(request)
        # Taken at once: another sequence's blocks could take their place in this very step.
        if length and self._allocate(held, 0, length, blocks):
            sequence.advance_reused(length)
            held.published = held.shortest = length
            if self.heads is not None and self.heads.has_pairs(sequence):
                self.heads.adopt(sequence, length)

    def _can_go_on(self, sequence: Sequence, held: _Held) -> bool:
        """True if what its next tokens need is still in its blocks."""
        computed = sequence.computed_length
        if computed < max(held.published, held.shortest):
            return False
        if not self.state_slots or computed == 0:
            return True
        back = computed - held.first_state
        if not 0 <= back < held.state_count:
            return False
        # A longer step goes on from the first state only
        return back == 0 or sequence.pending_count <= self.state_slots

    def is_ready(self, sequence: Sequence, end: int) -> bool:
        held = self._held.get(sequence)
        return held is not None and self._with_lookahead(end) <= held.capacity

    def room(self, sequence: Sequence) -> int:
        """Tokens behind the sequence's last one whose places the workers know."""
        held = self._held.get(sequence)
        if held is None or held.sent is None:
            return 0
        end: int = min(held.sent_capacity, self.manager.max_model_len)
        return max(end - sequence.length, 0)

    def _with_lookahead(self, end: int) -> int:
        """Tokens for which a step needs room that ends there. vLLM gives none beyond its longest sequence."""
        return min(end + self.lookahead, max(end, self.manager.max_model_len)) if self.lookahead else end

    def make_ready(self, sequence: Sequence, end: int) -> bool:
        """See `SequenceCache`. A new sequence has to find room for all of its tokens beside those that have begun: it
        would soon have to give up what it has begun otherwise."""
        held = self._held.get(sequence)
        if held is None:  # its pages were given to others in this step
            return False
        if not self._can_go_on(sequence, held):  # background work begins here
            self.reuse(sequence, sequence.pending_count)
            held = self._held[sequence]
        if self.is_ready(sequence, end):
            return True
        self._publish(sequence, held, sequence.computed_length)  # before a window leaves it behind
        is_first = held.sent is None and len(self._held) > 1
        held.request.num_computed_tokens = sequence.computed_length
        held.request.num_tokens = sequence.length
        return self._allocate(held, end - sequence.computed_length, must_fit=is_first)

    def _allocate(
        self, held: _Held, tokens: int, known: int = 0, blocks: Any = None, *, must_fit: bool = False
    ) -> bool:
        found = self.manager.allocate_slots(
            held.request,
            tokens,
            num_new_computed_tokens=known,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self.lookahead,
            delay_cache_blocks=True,  # it would believe that proposals are certain
            full_sequence_must_fit=must_fit,
        )
        if found is None:
            return False
        computed = held.request.num_computed_tokens + known
        size = self.block_tokens
        held.capacity = max(held.capacity, -(-self._with_lookahead(computed + tokens) // size) * size)
        if self.has_windows:
            held.shortest = max(held.shortest, computed)
        return True

    def take_spare(self, sequence: Sequence, count: int) -> int:
        """See `SequenceCache`. A branch takes blocks of its own: one for what it cannot share, and those of its tokens,
        so that twice as many blocks as tokens are enough however many branches there are."""
        can_share = self.hasher is not None and not sequence.is_private
        free = self.manager.block_pool.get_num_free_blocks()
        return min(count, free // (2 * self.shape.group_count)) if can_share else 0

    def take_over(self, sequence: Sequence, positions: SequenceOf[int]) -> None:
        """See `SequenceCache`: never asked, since branches do not lie behind their trunk."""

    def trim(self, sequence: Sequence) -> None:
        """See `SequenceCache`: a sequence has at most one block more than it needs, and its branches."""
        for branch in self._branches.pop(sequence, ()):
            self._let_go(branch)

    def branches(self, step: BranchStep) -> list[Sequence] | None:
        """The branches that go on, as sequences of their own, each with its token to be computed.

        They share the blocks of the tokens before the first of them leaves; what lies in a block that is not full is
        computed again for each. None where there is no room, or they were given up.
        """
        trunk = step.sequence
        known_hashes: SequenceOf[Any] = ()
        if step.depth == 0:
            self.trim(trunk)
            if (held := self._held.get(trunk)) is None:
                return None
            self._publish(trunk, held, min(step.trunk_lengths))
            hash_tokens = self.manager.block_pool.hash_block_size
            known_hashes = held.request.block_hashes[: held.published // hash_tokens]
            self._branches[trunk] = []
            for length in step.trunk_lengths:
                branch = Sequence(trunk.tables, trunk.max_length, trunk.vocabulary_size, scope=trunk.scope)
                branch.token_ids = trunk.token_ids[:length]
                self._branches[trunk].append(branch)
        branches = self._branches.get(trunk, [])[: step.token_count]
        for branch, token_id in zip(branches, step.token_ids, strict=False):
            branch.token_ids.append(token_id)
            if step.depth == 0:
                self.reuse(branch, 1, known_hashes)
                if not self.make_ready(branch, branch.length + step.max_depth - 1):
                    self.trim(trunk)
                    return None
        return branches or None

    def after_step(self, sequence: Sequence) -> None:
        """See `SequenceCache`: only the next step shows what of this one is certain."""

    def release(self, sequence: Sequence) -> None:
        self.trim(sequence)
        held = self._held.get(sequence)
        if held is not None:
            self._publish(sequence, held, sequence.computed_length)
            self._let_go(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.trim(sequence)
        self._preemption_count += self._held[sequence].capacity > 0
        self._let_go(sequence)
        sequence.restart()

    def distrust(self, sequence: Sequence) -> None:
        self.trim(sequence)
        held = self._held.get(sequence)
        if held is not None:
            ids = self.manager.get_block_ids(held.request.request_id)
            self.manager.evict_blocks({block for group in ids for block in group if block})
        self._let_go(sequence)
        sequence.restart()

    def _let_go(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence, None)
        if held is None:
            return
        if self.heads is not None:
            self.heads.lose(sequence)
        self.manager.free(held.request)
        if held.sent is not None:
            self._finished.append(held.request.request_id)

    def _publish(self, sequence: Sequence, held: _Held, length: int) -> None:
        """Make the full blocks of the first `length` tokens known to others, as far as a head has read them."""
        known = None if self.heads is None else self.heads.read_length(sequence)
        if known is not None:
            length = min(length, known)
        if length - held.published < self.block_tokens or self.hasher is None or sequence.is_private:
            return
        request = held.request
        request.num_tokens = length
        hash_tokens = self.manager.block_pool.hash_block_size
        del request.block_hashes[held.published // hash_tokens :]  # those behind may have been proposals
        request.block_hashes.extend(self.hasher(request))
        self.manager.cache_blocks(request, length)
        held.published = length // self.block_tokens * self.block_tokens

    def step(self, segments: SequenceOf[Segment], row_counts: SequenceOf[int]) -> Step:
        parts = [self._part(segment, rows) for segment, rows in zip(segments, row_counts, strict=True)]
        new_blocks = self.manager.take_new_block_ids()
        finished = self._finished
        self._finished = []
        return Step(
            parts, finished, new_blocks if self.manager.kv_cache_config.needs_kv_cache_zeroing else ()
        )

    def _part(self, segment: Segment, row_count: int) -> Part:
        sequence = segment.sequence
        held = self._held[sequence]
        self._publish(sequence, held, segment.start)
        is_new = held.sent is None
        new_ids: tuple[list[int], ...] = ()
        if held.sent is None or held.capacity > held.sent_capacity:
            ids = self.manager.get_block_ids(held.request.request_id)
            known = held.sent or (0,) * len(ids)
            new_ids = tuple(group[count:] for group, count in zip(ids, known, strict=True))
            held.sent = tuple(map(len, ids))
            held.sent_capacity = held.capacity
        # To the worker a proposal is no part of its sequence, so what is accepted of it is sent again.
        first = min(segment.start, held.sent_tokens)
        draft_count = max(row_count - 1, 0) if self.sends_proposals else 0
        kept_states = 0
        if self.state_slots:
            kept_states = self._next_states(held, segment, row_count)
            draft_count = segment.token_count - 1 if kept_states else 0
        held.sent_tokens = segment.end - draft_count
        tokens = sequence.token_ids[first : segment.end]
        return Part(
            held.request.request_id,
            is_new,
            segment.start,
            first,
            tokens,
            row_count,
            draft_count,
            new_ids,
            kept_states,
        )

    def _next_states(self, held: _Held, segment: Segment, row_count: int) -> int:
        """Note which states a step will keep; see `Part.kept_states` for what it returns.

        vLLM keeps those behind each token of a step that it takes for a verification. Any other step begins with the
        first state of the last one, and keeps its own last state in its place.
        """
        back = segment.start - held.first_state
        count = segment.token_count
        is_short = segment.start > 0 and count <= self.state_slots
        if is_short and (back > 0 or row_count > 1):
            held.first_state = segment.start + 1
            held.state_count = count
            return back + 1
        if segment.start > 0 and back > 0:
            raise RuntimeError(f"a step of {count} tokens would go on from a state that it cannot read")
        held.first_state = segment.end
        held.state_count = 1
        return 0
