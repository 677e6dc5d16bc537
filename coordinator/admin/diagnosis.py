"""Diagnoses a coordinator and its services: pure functions from known facts to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from coordinator.rejection import STRATEGIES
from coordinator.replicas.compatibility import MODEL_RULES, Deployment
from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.stats.speculation import acceptance_rate, cumulative_rates
from tandem import __version__
from tandem.admin import CoordinatorState, Finding, Severity, Status
from tandem.config.names import AUTO, AUTO_NAMES
from tandem.config.rule import broken
from tandem.plural import plural
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.rpc.addresses import is_local

ENOUGH_TOKENS = 200
"""Proposed tokens below which nothing is said about acceptance: a rate has a standard error of 3.5 % then."""
SLOW_ROUND_TRIP_SECONDS = 0.005
"""A round trip that takes longer is worth a word, and so is one that takes a good part of the target's step."""
LOW_ACCEPTANCE_RATE = 0.3
"""A rate below this is called low while step times are unknown."""
GOOD_ACCEPTANCE_RATE = 0.5
"""At this rate or above, drafting that does not pay is slow rather than inaccurate."""
WORTHWHILE = 1.05
"""Another number of speculative tokens is suggested when it promises this factor or more."""

_ADVICE = {
    ReplicaState.CONNECTING: "start it there, or correct the address; the coordinator keeps trying",
    ReplicaState.DOWN: "start it again, or look into its log; the coordinator keeps trying",
    ReplicaState.INCOMPATIBLE: "serve a model that matches the others there, or remove its address",
    ReplicaState.REFUSED: "give the coordinator a token that this service knows, with --service-token-file",
    ReplicaState.DRAINING: "if it is to take new sequences: tandem admin replicas resume {address}",
}


def diagnose(status: Status, settings: CoordinatorSettings) -> Iterator[Finding]:
    """All findings."""
    yield _targets(status)
    yield _drafting(status, settings)
    for replica in status.replicas:
        yield _replica_state(replica, status)
        yield from _replica_version(replica)
        yield from _round_trip(replica, status.replicas)
    yield from _models(status, settings)
    yield from _speculation(status)
    yield _rule(status)
    yield from _load(status, settings)
    yield acceptance(status)
    yield from _transport(status, settings)


def _targets(status: Status) -> Finding:
    targets = [replica for replica in status.replicas if replica.role is Role.TARGET]
    ready = sum(replica.state is ReplicaState.READY for replica in targets)
    words = f"{ready} of {len(targets)} take new sequences"
    if status.state is CoordinatorState.STARTING:
        words = "none was reached yet"
    if ready:
        return Finding.ok("targets", words)
    return Finding.problem("targets", words, "start a target service; until then requests wait and then fail")


def _drafting(status: Status, settings: CoordinatorSettings) -> Finding:
    drafts = [replica for replica in status.replicas if replica.role is Role.DRAFT]
    ready = sum(replica.state is ReplicaState.READY for replica in drafts)
    if not drafts:
        words, advice = "there is none: the target works alone", "start one, and name it with --draft-address"
    elif not settings.speculation:
        words = "speculation is off: the target works alone"
        advice = "tandem admin config set speculation true"
    elif not ready:
        words, advice = f"none of {len(drafts)} takes new sequences: the target works alone", ""
    else:
        return Finding.ok("drafts", f"{ready} of {len(drafts)} take new sequences")
    return Finding.warning("drafts", words, advice)


def _speculation(status: Status) -> Iterator[Finding]:
    """Acceptance says nothing about a draft that proposes nothing."""
    state = status.speculation_state
    if state.is_on:
        tokens = plural(state.num_speculative_tokens, "token")
        yield Finding.ok("speculation", f"on, {tokens} proposed per round")
    elif state.figures:  # a setting or an absence has a finding of its own
        yield Finding.warning("speculation", f"off: {state.explanation}", _FASTER_DRAFT)


def _replica_state(replica: ReplicaSnapshot, status: Status) -> Finding:
    if replica.state is ReplicaState.READY:
        times = (("round trip", replica.round_trip_seconds), ("step", replica.step_seconds))
        known = [f"{name} {seconds * 1000:.1f} ms" for name, seconds in times if seconds is not None]
        return Finding.ok(replica.role.value, ", ".join(["ready", *known]), replica.address)
    is_needed = replica.role is Role.TARGET and not status.state.completes
    reason = f": {replica.reason}" if replica.reason else ""
    return Finding(
        replica.role.value,
        replica.address,
        Severity.PROBLEM if is_needed else Severity.WARNING,
        f"{replica.state.value} for {replica.since_seconds:.0f} s{reason}",
        _ADVICE[replica.state].format(address=replica.address),
    )


def _replica_version(replica: ReplicaSnapshot) -> Iterator[Finding]:
    version = "" if replica.model is None else replica.model.service_version
    if version and version != __version__:
        yield Finding.warning(
            "version",
            f"it is {version} and the coordinator {__version__}",
            "run one version everywhere; an upgrade may mix two for as long as it lasts",
            replica.address,
        )


def _round_trip(replica: ReplicaSnapshot, replicas: Sequence[ReplicaSnapshot]) -> Iterator[Finding]:
    seconds = replica.round_trip_seconds
    steps = [other.step_seconds for other in replicas if other.role is Role.TARGET and other.step_seconds]
    bearable = min([SLOW_ROUND_TRIP_SECONDS, *(max(step / 4, 0.001) for step in steps)])
    if seconds is not None and seconds > bearable:
        yield Finding.warning(
            "round trip",
            f"{seconds * 1000:.1f} ms, which every round waits for",
            "this machine is busy: give its services cores of their own"
            if is_local(replica.address)
            else "bring it nearer to the coordinator, or propose more tokens in each round",
            replica.address,
        )


def _models(status: Status, settings: CoordinatorSettings) -> Iterator[Finding]:
    target = next((r.model for r in status.replicas if r.role is Role.TARGET and r.model is not None), None)
    if target is None:
        return
    drafts = [r for r in status.replicas if r.role is Role.DRAFT and r.model is not None]
    for replica in drafts:
        sentences = broken(MODEL_RULES, Deployment(settings, target, replica.model))
        if sentences:
            yield Finding.warning(
                "models",
                "; ".join(sentences),
                _ADVICE[ReplicaState.INCOMPATIBLE],
                replica.address,
            )
        elif replica.model is not None:
            what = replica.model.name if replica.model.has_model else f"{replica.model.architecture} drafting"
            mapped = "" if replica.coverage is None else f" by vocabulary mapping: {replica.coverage}"
            yield Finding.ok("models", f"{what} matches {target.name}{mapped}", replica.address)


def _rule(status: Status) -> Finding:
    if status.settings.rule == AUTO:
        names = ", ".join(AUTO_NAMES)
        words = f"{AUTO}: the fastest of {names}; with each the output is distributed as the target's own"
        return Finding.ok("rule", words)
    strategy = next(strategy for strategy in STRATEGIES if strategy.name == status.settings.rule)
    if strategy.name == "synthetic":
        return Finding.warning(
            "rule",
            "synthetic: what is accepted has nothing to do with the models; it is for benchmarks",
            "tandem admin config set rejection_sampling_strategy null",
        )
    if not strategy.lossless:
        words = f"{strategy.name}: the output is not distributed as the target's own, except at temperature 0"
        return Finding.ok("rule", words)
    return Finding.ok("rule", f"{strategy.name}: the output is distributed as the target's own")


def _load(status: Status, settings: CoordinatorSettings) -> Iterator[Finding]:
    load = status.load
    words = f"{load.running} running, {load.queued} waiting"
    if not load.queued:
        yield Finding.ok("load", words)
        return
    yield Finding.warning(
        "load",
        f"{words}; at most {settings.max_concurrent_requests} run at once",
        "add a target, or raise max_concurrent_requests if the targets have room",
    )


def acceptance(status: Status) -> Finding:
    """Find whether speculation pays, and the best number of proposed tokens."""
    stats, tokens = status.speculation, status.settings.num_speculative_tokens
    if stats.drafted < ENOUGH_TOKENS:
        few = (
            f"{plural(stats.drafted, 'token')} proposed so far: too few to judge ({ENOUGH_TOKENS} are enough)"
        )
        return Finding.ok("acceptance", few)
    rate = acceptance_rate(stats)
    words = f"{rate:.0%} of {stats.drafted:,} proposed tokens"
    cost = relative_cost(status.replicas, tokens)
    if cost is None:
        if rate >= LOW_ACCEPTANCE_RATE:
            return Finding.ok("acceptance", words)
        return Finding.warning("acceptance", f"{words} is low", _BETTER_DRAFT)
    rates = cumulative_rates(stats)
    best = max(range(len(rates) + 1), key=lambda count: gain(rates[:count], cost))
    now, then = gain(rates[:tokens], cost), gain(rates[:best], cost)
    words = f"{words}; step times allow about {now:.2f} times the speed of the target alone"
    if then < WORTHWHILE * now or best == tokens:
        return Finding.ok("acceptance", words) if now > 1.0 else Finding.warning("acceptance", words)
    if best == 0:
        # A draft that guesses well does not pay because it is slow.
        cause = _FASTER_DRAFT if rate >= GOOD_ACCEPTANCE_RATE else _BETTER_DRAFT
        advice = f"{cause}; until then: tandem admin config set speculation false"
    else:
        advice = f"about {then:.2f} times with: tandem admin config set num_speculative_tokens {best}"
    return Finding.warning("acceptance", words, advice)


_FASTER_DRAFT = (
    "the draft takes too long for what it gains: use a smaller one, or ngram or suffix drafting, or give draft and "
    "target cores or devices of their own"
)

_BETTER_DRAFT = "use a draft that is trained on such text, or ngram or suffix drafting for text that repeats"


def relative_cost(replicas: Sequence[ReplicaSnapshot], num_speculative_tokens: int) -> float | None:
    """Time to draft one token, as a share of the time that the target takes to verify; None when not measured."""
    steps = {role: [each.step_seconds or 0.0 for each in replicas if each.role is role] for role in Role}
    known = {role: [seconds for seconds in times if seconds] for role, times in steps.items()}
    if not all(known.values()):
        return None
    return fmean(known[Role.DRAFT]) / num_speculative_tokens / fmean(known[Role.TARGET])


def gain(cumulative: Sequence[float], cost: float) -> float:
    """Expected speed-up over the target alone (Leviathan et al. 2023, arXiv 2211.17192, Theorem 3.8).

    Args:
        cumulative: For each position of a proposal, the share of its tokens that is accepted, shape [K].
        cost: Time to draft one token over the time to verify a proposal, which is taken not to depend on K.
    """
    return (1.0 + sum(cumulative)) / (1.0 + len(cumulative) * cost)


def _transport(status: Status, settings: CoordinatorSettings) -> Iterator[Finding]:
    if settings.service_credentials.uses_tls:
        yield Finding.ok("services", "the coordinator reaches them by TLS")
        return
    remote = [replica.address for replica in status.replicas if not is_local(replica.address)]
    if not remote:
        yield Finding.ok("services", "plain text, within this machine")
        return
    yield Finding.warning(
        "services",
        f"prompts and completions travel to {len(remote)} of them in plain text",
        "give the services certificates, and the coordinator --service-tls-ca-file",
    )
