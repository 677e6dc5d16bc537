"""Requests to contenders and their answers. Standard library only: other engines' Pythons read it too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts to complete at once, each by the same number of tokens."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids; the batch has as many requests."""
    temperature: float
    max_tokens: int
    """Tokens of each completion; end-of-sequence ids do not end it."""
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the pipe to another process."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Workload:
        """The reverse of `to_json`."""
        prompts = tuple(tuple(prompt) for prompt in data["prompts"])
        return Workload(prompts, data["temperature"], data["max_tokens"], data["seed"])


@dataclass(slots=True)
class Answer:
    """One completion and the times of its chunks."""

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the batch began, and the number of tokens that arrived then."""

    def add(self, seconds: float, token_ids: list[int]) -> None:
        """Note a piece."""
        if token_ids:
            self.token_ids += token_ids
            self.arrivals.append((seconds, len(token_ids)))


@dataclass(slots=True)
class Outcome:
    """Result of a workload."""

    answers: list[Answer]
    seconds: float
    """From the start to the last token of the last request."""
    rounds: int = 0
    """Passes of the target, over all requests; 0 where that is not known."""
    drafted: int = 0
    accepted: int = 0
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round with a proposal, by phase; empty where that is not known."""

    @property
    def token_count(self) -> int:
        """Tokens of all completions."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """For the pipe to another process."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Outcome:
        """The reverse of `to_json`."""
        answers = [
            Answer(answer["token_ids"], [(seconds, count) for seconds, count in answer["arrivals"]])
            for answer in data["answers"]
        ]
        return Outcome(**{**data, "answers": answers})
