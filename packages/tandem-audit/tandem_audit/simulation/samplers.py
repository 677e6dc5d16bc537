"""Speculative samplers with planted faults, over a small synthetic language: what an audit has to find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem_audit.client import LISTED
from tandem_audit.statistics import BoolArray, FloatArray, IntArray, Steps

RIGHT = "none"
FAULTS = {
    "recovery shares the draft's noise": "the recovered token is the argmax with the noise that the draft used",
    "recovery noise is reused": "every recovery of a completion uses the same noise",
    "draft truncated after sampling": "the draft samples all of q, the rule sees its 6 most probable tokens",
    "residual is the target": "a rejected token is replaced by a sample of p",
    "draft's uniform is reused": "the uniform that drew the draft's token decides on its acceptance",
    "bonus from the wrong row": "after full acceptance the row before the last is sampled",
    "temperature applied twice": "p ** (1 / T**2) in place of p ** (1 / T)",
    "top-p of the draft alone": "the draft is truncated and renormalised, the target is not",
    "log probabilities of the draft": "reported where a proposed token was accepted",
    "typical-acceptance": "a lossy rule: p > min(0.09, 0.3 exp(-H)) accepts",
}
PROPOSED = 4
"""Tokens of a proposal."""


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """Distributions of the next token given the last two, of a target and of a draft that sees only the last one."""

    target: FloatArray
    """[V * V, V]."""
    draft: FloatArray
    """[V * V, V]."""

    @property
    def size(self) -> int:
        return int(self.target.shape[1])

    @classmethod
    def random(cls, size: int = 64, seed: int = 5) -> Language:
        """A language whose draft is accepted at about two positions of three, and whose entropy is about 2 nats."""
        generator = np.random.default_rng(seed)
        shared = 1.4 * generator.standard_normal(size) + 1.6 * generator.standard_normal((size, size))
        target = shared + 1.1 * generator.standard_normal((size, size, size))
        draft = shared + 0.5 * generator.standard_normal((size, size))
        return cls(
            _softmax(target.reshape(-1, size)), _softmax(np.repeat(draft[None], size, 0).reshape(-1, size))
        )

    def after(self, contexts: Any, tokens: Any) -> Any:
        """The contexts behind these tokens: integers, or [N] each."""
        return contexts % self.size * self.size + tokens


def _softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _warp(probs: FloatArray, temperature: float, top_p: float) -> FloatArray:
    """The distributions at a temperature, each cut to its most probable tokens that hold `top_p`."""
    logits = np.log(probs) / temperature
    warped = _softmax(logits)
    if top_p >= 1.0:
        return warped
    order = np.argsort(-warped, axis=1, kind="stable")
    ranked = np.take_along_axis(warped, order, axis=1)
    before = ranked.cumsum(axis=1) - ranked
    kept = np.zeros_like(warped)
    np.put_along_axis(kept, order, np.where(before < top_p, ranked, 0.0), axis=1)
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))


def _draw(probs: FloatArray, uniforms: FloatArray) -> IntArray:
    """By the inverse of the distribution function. [N, V] and [N] to [N]."""
    sums = probs.cumsum(axis=1)
    below = sums < uniforms[:, None] * sums[:, -1:]
    return np.asarray(np.minimum(below.sum(axis=1), probs.shape[1] - 1))


@dataclass(slots=True)
class Sampler:
    """Speculative sampling, right or with one fault."""

    language: Language
    fault: str = RIGHT
    temperature: float = 1.0
    top_p: float = 1.0
    _target: FloatArray = field(init=False)
    _draft: FloatArray = field(init=False)
    _seen: FloatArray = field(init=False)
    """The draft's distributions as the rule sees them."""

    def __post_init__(self) -> None:
        language = self.language
        temperature = self.temperature
        top_p = self.top_p
        self._draft = self._seen = _warp(language.draft, temperature, top_p)
        if self.fault == "temperature applied twice":
            temperature = temperature**2
        if self.fault == "top-p of the draft alone":
            top_p = 1.0
        self._target = _warp(language.target, temperature, top_p)
        if self.fault == "draft truncated after sampling":
            least = np.sort(self._draft, axis=1)[:, -6, None]
            kept = np.where(self._draft >= least, self._draft, 0.0)
            self._seen = kept / kept.sum(axis=1, keepdims=True)

    def generate(
        self, contexts: IntArray, length: int, generator: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Tokens behind the last two of N prompts (V * first + second), and 1 where a proposed token was accepted. Both
        [N, length]."""
        count = len(contexts)
        size = self.language.size
        tokens = np.zeros((count, length + PROPOSED + 1), np.int64)
        kept = np.zeros_like(tokens)
        lengths = np.zeros(count, np.int64)
        contexts = contexts.copy()
        reused = generator.exponential(size=(count, size))
        while (active := np.flatnonzero(lengths < length)).size:
            found, accepted = self._round(contexts[active], generator, reused[active])
            for i in range(PROPOSED + 1):
                rows = active[i <= accepted]
                tokens[rows, lengths[rows] + i] = found[i <= accepted, i]
                kept[rows, lengths[rows] + i] = (i < accepted)[i <= accepted]
                contexts[rows] = self.language.after(contexts[rows], found[i <= accepted, i])
            lengths[active] += accepted + 1
        return tokens[:, :length], kept[:, :length]

    def _round(
        self, contexts: IntArray, generator: np.random.Generator, reused: FloatArray
    ) -> tuple[IntArray, IntArray]:
        """One round for each sequence: its tokens [N, K + 1], of which accepted + 1 [N] count."""
        count = len(contexts)
        size = self.language.size
        found = np.zeros((count, PROPOSED + 1), np.int64)
        accepted = np.zeros(count, np.int64)
        is_going_on = np.ones(count, bool)
        rows = np.arange(count)
        before = contexts
        for i in range(PROPOSED):
            uniforms = generator.random(count)
            noise = generator.exponential(size=(count, size))
            draft = self._draft[contexts]
            seen = self._seen[contexts]
            target = self._target[contexts]
            raced = self.fault == "recovery shares the draft's noise"
            proposed = (draft / noise).argmax(axis=1) if raced else _draw(draft, uniforms)
            if self.fault != "draft's uniform is reused":
                uniforms = generator.random(count)
            pair = target[rows, proposed], seen[rows, proposed]
            is_kept = is_going_on & self._accepts(*pair, target, uniforms)
            residual = np.maximum(target - seen, 0.0)
            if self.fault in ("residual is the target", "typical-acceptance"):
                residual = target
            if self.fault == "recovery noise is reused":
                noise = reused
            elif not raced:
                noise = generator.exponential(size=(count, size))
            recovered = (residual / noise).argmax(axis=1)
            found[:, i] = np.where(is_going_on, np.where(is_kept, proposed, recovered), found[:, i])
            accepted += is_kept
            is_going_on = is_kept
            before = contexts
            contexts = self.language.after(contexts, proposed)
        if self.fault == "bonus from the wrong row":
            contexts = before
        found[:, PROPOSED] = _draw(self._target[contexts], generator.random(count))
        return found, accepted

    def _accepts(
        self, probs: FloatArray, draft_probs: FloatArray, target: FloatArray, uniforms: FloatArray
    ) -> BoolArray:
        """The rule, of the proposed tokens' probabilities, [N] each, and the target's distributions [N, V]."""
        if self.fault == "typical-acceptance":
            entropy = -(target * np.log(np.maximum(target, 1e-300))).sum(axis=1)
            return np.asarray(probs > np.minimum(0.09, 0.3 * np.exp(-entropy)))
        return np.asarray(uniforms * draft_probs <= probs)


def steps_of(
    language: Language, contexts: IntArray, tokens: IntArray, accepted: IntArray, fault: str
) -> Steps:
    """The log probabilities that a server would report: raw ones of the target, unless that is the fault."""
    count, length = tokens.shape
    before = np.concatenate(
        [contexts[:, None] // language.size, contexts[:, None] % language.size, tokens], 1
    )
    places = (before[:, :-2] * language.size + before[:, 1:-1]).reshape(-1)
    probs = language.target[places]
    if fault == "log probabilities of the draft":
        probs = np.where(accepted.reshape(-1, 1) > 0, language.draft[places], probs)
    order = np.argpartition(-probs, LISTED, axis=1)[:, :LISTED]
    order = np.take_along_axis(order, np.argsort(-np.take_along_axis(probs, order, 1), axis=1), axis=1)
    flat = tokens.reshape(-1)
    is_drawn = order == flat[:, None]
    chosen = np.where(is_drawn.any(axis=1), is_drawn.argmax(axis=1), LISTED)
    return Steps(
        ids=order.astype(np.int64),
        probs=np.take_along_axis(probs, order, axis=1),
        chosen=chosen.astype(np.int64),
        tokens=flat,
        index=np.tile(np.arange(length), count),
        is_usable=np.ones(len(flat), bool),
    )
