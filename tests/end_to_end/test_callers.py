"""A client with a token of its own reads nothing of what another client was told: attacks over HTTP on real processes.

Each attack is also made where the operator lets callers share, and succeeds there: otherwise it would show nothing.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.model.types import common_length
from tests.end_to_end.processes import NO_KERNELS, address_of, coordinator, model_service, service
from tests.paths import DEMO_TARGET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
LETTERS = "QZJVKWYH"
"""No token has two of them."""
LETTER_IDS: list[int] = TOKENIZER.encode(LETTERS).ids
CALLERS = ("the-token-of-the-first-caller", "the-token-of-the-second-caller")
K = 8
TOLD, KNOWN = 32, 6
"""Tokens of the answer that is attacked, and how many of them the attacker knows."""
LENGTHS = 2
"""Numbers of known tokens behind which the next one is guessed."""
ANSWER_SECONDS = 300.0
SHARING = ("--share-between-callers", "suffix")


@dataclass(frozen=True)
class Cluster:
    """A coordinator with two tokens over the target of all and a suffix draft of its own."""

    url: str

    def complete(self, caller: int, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Ask for a completion with one of the tokens, and return the answer."""
        body = {"model": "target", "prompt": prompt, "return_token_ids": True, **fields}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        request.add_header("authorization", f"Bearer {CALLERS[caller]}")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def tell(self) -> list[int]:
        """Let the first caller have its answer, which is too varied for a model to guess."""
        form = {"regex": f"[{LETTERS}]{{400}}"}
        answer = self.complete(
            0, "A letter begins:", max_tokens=TOLD, seed=12, temperature=1000, structured_outputs=form
        )
        return ids_of(answer)


def ids_of(answer: dict[str, Any]) -> list[int]:
    (choice,) = answer["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, on whose target and draft nobody else is."""
    tokens = tmp_path_factory.mktemp("callers") / "tokens"
    tokens.write_text("\n".join(CALLERS), encoding="utf-8")
    options = (
        *("--auth-token-file", str(tokens), "--http-port", "0", "--num-speculative-tokens", str(K)),
        # The operator allows the rule by which a client makes a model say whatever is proposed.
        *("--allowed-rejection-sampling-strategies", "greedy,residual,typical-acceptance"),
    )
    with ExitStack() as stack:
        target = stack.enter_context(model_service("tandem_target", DEMO_TARGET, *NO_KERNELS))

        def start(*more: str) -> Cluster:
            draft = stack.enter_context(service("tandem_draft", "--method", "suffix"))
            joined = stack.enter_context(coordinator(address_of(target), address_of(draft), *options, *more))
            address_of(joined)
            return Cluster(joined.line("http on "))

        yield start


# ---- the attacks: each returns what the attacker sees, and how many unknown tokens of the answer it tells


Seen = tuple[Any, int]


def count_drafted(cluster: Cluster, told: Sequence[int]) -> Seen:
    """Under `greedy`, whose text does not change, a summary says how much was drafted behind each guess.

    The bias lets the answer begin with the guess, which is right where more is drafted than behind all others.
    """
    table = []
    learnt = 0
    for length in range(KNOWN, KNOWN + LENGTHS):
        counts = {}
        for guess in LETTER_IDS:
            answer = cluster.complete(
                1, told[:length], max_tokens=K + 2, temperature=0, logit_bias={str(guess): 100}
            )
            assert ids_of(answer)[0] == guess
            counts[guess] = answer["speculation"]["drafted"]
        table.append(counts)
        most = [guess for guess, count in counts.items() if count == max(counts.values())]
        learnt += most == [told[length]]
    return table, learnt


def read_on(cluster: Cluster, told: Sequence[int]) -> Seen:
    """A rule that takes whatever is proposed at a huge temperature reads on from the tokens that are known.

    A form lets the answer begin with the last known token; it would be proposed itself if the form left no choice.
    """
    known = list(told[:KNOWN])
    while len(known) < len(told) and (read := _proposed_behind(cluster, known)):
        known += read
    return known, common_length(known, told) - KNOWN


def _proposed_behind(cluster: Cluster, known: Sequence[int]) -> list[int]:
    last = TOKENIZER.decode(known[-1:])
    other = next(letter for letter in LETTERS if letter != last)
    form = {"regex": f"[{last}{other}][{LETTERS}]{{400}}"}
    rule = {"rejection_sampling_strategy": "typical-acceptance", "temperature": 1e6}
    for seed in range(16):
        # A round behind the first token, whose last one nobody has drafted
        answer = cluster.complete(1, known[:-1], max_tokens=K + 2, seed=seed, structured_outputs=form, **rule)
        if ids_of(answer)[0] == known[-1]:
            drafted: list[bool] = answer["choices"][0]["drafted"]
            return ids_of(answer)[1 : drafted.index(False, 1)]
    raise AssertionError("the answer never began with the last known token")


def test_an_answer_is_read_by_its_own_caller_alone(clusters: Callable[..., Cluster]) -> None:
    """Another token sees what it would see if the answer had never been given; where callers share, it reads it."""
    sharing = clusters(*SHARING)
    apart = clusters()
    untouched = clusters()
    told = sharing.tell()
    assert len(told) == TOLD
    assert apart.tell() == told
    for attack, least in ((count_drafted, LENGTHS), (read_on, TOLD - KNOWN - K - 1)):
        _, learnt = attack(sharing, told)
        assert learnt >= least
        seen, learnt = attack(apart, told)
        assert learnt == 0
        assert (seen, learnt) == attack(untouched, told)
