"""Diagnoses a coordinator and its services: pure functions from known facts to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem import __version__
from tandem.acceptance.strategies import STRATEGIES
from tandem.config.names import AUTO, AUTO_NAMES
from tandem.config.rule import broken
from tandem.errors import plural
from tandem.model.admin import CoordinatorState, Finding, Status
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.types import ModelInfo
from tandem.rpc.addresses import is_local
from tandem_coordinator.replicas.compatibility import MODEL_RULES, Deployment
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.speculation_report import Advice
from tandem_coordinator.stats.speculation import acceptance_rate

ENOUGH_TOKENS = 200
"""Proposed tokens below which nothing is said about acceptance: a rate has a standard error of 3.5 % then."""
SLOW_ROUND_TRIP_SECONDS = 0.005
"""A round trip that takes longer is worth a word, and so is one that takes a good part of the target's step."""
LOW_ACCEPTANCE_RATE = 0.3
"""A rate below this is called low while nothing was predicted."""
GOOD_ACCEPTANCE_RATE = 0.5
"""At this rate or above, drafting that does not pay is slow rather than inaccurate."""
WORTHWHILE = 1.05
"""Another length is suggested when it is predicted to make this factor or more."""

_ADVICE = {
    ReplicaState.CONNECTING: "start it there, or correct the address; the coordinator keeps trying",
    ReplicaState.DOWN: "start it again, or look into its log; the coordinator keeps trying",
    ReplicaState.INCOMPATIBLE: "serve a model that matches the others there, or remove its address",
    ReplicaState.REFUSED: "give the coordinator a token that this service knows, with --service-token-file",
    ReplicaState.DRAINING: "if it is to take new sequences: tandem admin replicas resume {address}",
}


def diagnose(
    status: Status, settings: CoordinatorSettings, advice: Advice | None = None
) -> Iterator[Finding]:
    """All findings, with the controller's advice where it has any."""
    targets = [each for each in status.replicas if each.role is Role.TARGET]
    drafts = [each for each in status.replicas if each.role is Role.DRAFT]
    yield _targets(status, targets)
    yield _drafts(settings, drafts, targets)
    for replica in status.replicas:
        yield from _replica(replica, status)
    target = next((each.model for each in targets if each.model is not None), None)
    for draft in drafts:
        if target is not None and draft.model is not None:
            yield _match(settings, target, draft, draft.model)
    yield from _speculation(status)
    yield _rule(status)
    yield _load(status, settings)
    yield judge_acceptance(status, settings, advice)
    yield _transport(status, settings)


def _targets(status: Status, targets: Sequence[ReplicaSnapshot]) -> Finding:
    ready = sum(replica.state is ReplicaState.READY for replica in targets)
    words = f"{ready} of {len(targets)} take new sequences"
    if ready:
        return Finding.ok("targets", words)
    words = "none was reached yet" if status.state is CoordinatorState.STARTING else words
    advice = "start a target service; until then requests wait and then fail"
    return Finding.problem("targets", words, advice)


def _drafts(
    settings: CoordinatorSettings, drafts: Sequence[ReplicaSnapshot], targets: Sequence[ReplicaSnapshot]
) -> Finding:
    methods = [each.model.drafting_method for each in targets if each.model is not None]
    heads = [method for method in methods if method]
    if not drafts and not heads:
        advice = "start one, and name it with --draft-address"
        return Finding.warning("drafts", "there is none: the target works alone", advice)
    if not settings.speculation:
        advice = "tandem admin config set speculation true"
        return Finding.warning("drafts", "speculation is off: the target works alone", advice)
    if not drafts:
        names = ", ".join(sorted(set(heads)))
        words = f"{len(heads)} of {len(targets)} targets draft by heads of their own ({names})"
        if len(heads) == len(targets):
            return Finding.ok("drafts", words)
        return Finding.warning("drafts", f"{words}; the others work alone")
    if not (ready := sum(replica.state is ReplicaState.READY for replica in drafts)):
        return Finding.warning("drafts", f"none of {len(drafts)} takes new sequences: the target works alone")
    return Finding.ok("drafts", f"{ready} of {len(drafts)} take new sequences")


def _state(replica: ReplicaSnapshot, status: Status) -> Finding:
    """A replica's state."""
    address = replica.address
    if replica.state is ReplicaState.READY:
        times = (("round trip", replica.round_trip_seconds), ("step", replica.step_seconds))
        known = [f"{name} {each * 1000:.1f} ms" for name, each in times if each is not None]
        return Finding.ok(replica.role.value, ", ".join(["ready", *known]), address)
    is_needed = replica.role is Role.TARGET and not status.state.completes
    reason = f": {replica.reason}" if replica.reason else ""
    words = f"{replica.state.value} for {replica.since_seconds:.0f} s{reason}"
    judged = Finding.problem if is_needed else Finding.warning
    return judged(replica.role.value, words, _ADVICE[replica.state].format(address=address), address)


def _replica(replica: ReplicaSnapshot, status: Status) -> Iterator[Finding]:
    address = replica.address
    seconds = replica.round_trip_seconds
    yield _state(replica, status)
    version = "" if replica.model is None else replica.model.service_version
    if version and version != __version__:
        words = f"it is {version} and the coordinator {__version__}"
        advice = "run one version everywhere; an upgrade may mix two for as long as it lasts"
        yield Finding.warning("version", words, advice, address)
    steps = [each.step_seconds for each in status.replicas if each.role is Role.TARGET and each.step_seconds]
    if seconds is not None and seconds > min([SLOW_ROUND_TRIP_SECONDS, *(max(s / 4, 0.001) for s in steps)]):
        advice = "bring it nearer to the coordinator, or propose more tokens in each round"
        if is_local(address):
            advice = "this machine is busy: give its services cores of their own"
        words = f"{seconds * 1000:.1f} ms, which every round waits for"
        yield Finding.warning("round trip", words, advice, address)


def _match(
    settings: CoordinatorSettings, target: ModelInfo, replica: ReplicaSnapshot, draft: ModelInfo
) -> Finding:
    if sentences := broken(MODEL_RULES, Deployment(settings, target, draft)):
        advice = _ADVICE[ReplicaState.INCOMPATIBLE]
        return Finding.warning("models", "; ".join(sentences), advice, replica.address)
    what = draft.name if draft.has_model else f"{draft.architecture} drafting"
    mapped = "" if replica.coverage is None else f" by vocabulary mapping: {replica.coverage}"
    matches = f"{what} matches {target.name}{mapped}"
    if differences := list(_positions(target, draft)):
        advice = "acceptance may be lower, or fall with a text's length; a draft of the target's family has the same"
        return Finding.warning(
            "models", f"{matches}, but {', and '.join(differences)}", advice, replica.address
        )
    return Finding.ok("models", matches, replica.address)


def _positions(target: ModelInfo, draft: ModelInfo) -> Iterator[str]:
    """Differences in how the two models encode positions, as far as both say it."""
    if draft.rope and target.rope and draft.rope != target.rope:
        yield f"the draft's rotary embedding is {draft.rope} and the target's {target.rope}"
    if 0 < draft.trained_length < target.max_length:
        yield (
            f"the draft was trained for {draft.trained_length} positions, and texts may have {target.max_length}"
        )


def _speculation(status: Status) -> Iterator[Finding]:
    """Acceptance says nothing about a draft that proposes nothing."""
    state = status.speculation_state
    if state.is_on:
        tokens = plural(state.num_speculative_tokens, "token")
        yield Finding.ok("speculation", f"on, {tokens} proposed per round")
    elif state.figures:  # a setting or an absence has a finding of its own
        yield Finding.warning("speculation", f"off: {state.explanation}", _FASTER_DRAFT)


def _rule(status: Status) -> Finding:
    if status.settings.rule == AUTO:
        names = ", ".join(AUTO_NAMES)
        words = f"{AUTO}: the fastest of {names}; with each the output is distributed as the target's own"
        return Finding.ok("rule", words)
    strategy = next(strategy for strategy in STRATEGIES if strategy.name == status.settings.rule)
    if strategy.name == "synthetic":
        words = "synthetic: what is accepted has nothing to do with the models; it is for benchmarks"
        advice = "tandem admin config set rejection_sampling_strategy null"
        return Finding.warning("rule", words, advice)
    if strategy.lossless:
        return Finding.ok("rule", f"{strategy.name}: the output is distributed as the target's own")
    words = f"{strategy.name}: the output is not distributed as the target's own, except at temperature 0"
    return Finding.ok("rule", words)


def _load(status: Status, settings: CoordinatorSettings) -> Finding:
    words = f"{status.load.running} running, {status.load.queued} waiting"
    if not status.load.queued:
        return Finding.ok("load", words)
    words = f"{words}; at most {settings.max_concurrent_requests} run at once"
    advice = "add a target, or raise max_concurrent_requests if the targets have room"
    return Finding.warning("load", words, advice)


def judge_acceptance(status: Status, settings: CoordinatorSettings, advice: Advice | None) -> Finding:
    """Find whether speculation pays, and whether another length would pay more."""
    stats = status.speculation
    if stats.drafted < ENOUGH_TOKENS:
        few = f"{plural(stats.drafted, 'token')} proposed so far: too few to judge"
        return Finding.ok("acceptance", f"{few} ({ENOUGH_TOKENS} are enough)")
    rate = acceptance_rate(stats)
    words = f"{rate:.0%} of {stats.drafted:,} proposed tokens"
    if advice is None:
        if rate >= LOW_ACCEPTANCE_RATE:
            return Finding.ok("acceptance", words)
        return Finding.warning("acceptance", f"{words} is low", _BETTER_DRAFT)
    words = (
        f"{words}; predicted {advice.gain_now:.2f} times the speed of the target alone at batch {advice.load}"
    )
    is_adaptive = settings.speculation_policy == "adaptive"
    is_longer = advice.num_speculative_tokens > settings.num_speculative_tokens
    if advice.gain_then < WORTHWHILE * advice.gain_now or (is_adaptive and not is_longer):
        return Finding.ok("acceptance", words)
    then = f"about {advice.gain_then:.2f} times"
    if advice.num_speculative_tokens == 0:
        # A draft that guesses well does not pay because it is slow.
        cause = _FASTER_DRAFT if rate >= GOOD_ACCEPTANCE_RATE else _BETTER_DRAFT
        better = f"{cause}; until then: tandem admin config set speculation false"
    elif is_longer:
        better = (
            f"{then} with: tandem admin config set num_speculative_tokens {advice.num_speculative_tokens}"
        )
    else:
        better = f"{then} with: tandem admin config set speculation_policy adaptive"
    return Finding.warning("acceptance", words, better)


_FASTER_DRAFT = (
    "the draft takes too long for what it gains: use a smaller one, or ngram or suffix drafting, or give draft and "
    "target cores or devices of their own"
)

_BETTER_DRAFT = "use a draft that is trained on such text, or ngram or suffix drafting for text that repeats"


def _transport(status: Status, settings: CoordinatorSettings) -> Finding:
    if settings.service_credentials.uses_tls:
        return Finding.ok("services", "the coordinator reaches them by TLS")
    remote = sum(not is_local(replica.address) for replica in status.replicas)
    if not remote:
        return Finding.ok("services", "plain text, within this machine")
    words = f"prompts and completions travel to {remote} of them in plain text"
    advice = "give the services certificates, and the coordinator --service-tls-ca-file"
    return Finding.warning("services", words, advice)
