"""False alarms of an audit, and the smallest bias that it finds, by simulation without a server.

    python -m tandem_audit.simulation --false-alarms 1000      right samplers, each of its own language and seed
    python -m tandem_audit.simulation --faults 20              each planted fault of `samplers`
    python -m tandem_audit.simulation --power 100              biases of a total variation of 0.0125

A run has as many tokens as 10 minutes at 100 tokens a second give, in the shares of an audit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tandem_audit.run import COLD, MAIN, NUCLEUS, TEMPERATURE, TOP_P, condition_steps
from tandem_audit.simulation.samplers import FAULTS, PROPOSED, RIGHT, Language, Sampler, steps_of
from tandem_audit.statistics import ALPHA, LEVEL, Calibration, Evidence, FloatArray, IntArray, Steps

TOKENS = 60_000
"""Length of the audits whose power the project reports."""
LENGTH = 64
"""Tokens of a completion."""
VARIATION = 0.0125
"""Mean total variation of the forms of a small fault, whose detection the project reports."""
_PROMPTS = 24
"""Beginnings of completions."""
_LEVELS = (0.01, 0.001, ALPHA, 0.0002)
"""A study shows how many audits have a finding at each."""
_LOOKS = {COLD: (0.05, TEMPERATURE, 1.0), NUCLEUS: (0.05, 1.0, TOP_P), MAIN: (0.9, 1.0, 1.0)}
"""Share of the tokens, temperature and top-p of each."""

Generate = Callable[[str, IntArray, np.random.Generator], tuple[IntArray, IntArray]]
"""Makes completions for a look: of prompts, tokens and which of them were accepted."""


def simulate(
    language: Language, generate: Generate, seed: int, tokens: int = TOKENS, fault: str = RIGHT
) -> tuple[Evidence, int]:
    """The evidence of one audit, and how many tokens top-p should have removed."""
    generator = np.random.default_rng(seed)
    evidence = Evidence({name: Calibration(name != MAIN, PROPOSED + 1) for name in _LOOKS})
    prompts = np.random.default_rng(1).integers(0, language.size**2, _PROMPTS)
    size = 16 * LENGTH  # in batches, as `tandem_audit.run` reads completions
    removed = 0
    for name, (share, *_) in _LOOKS.items():
        count = max(1, round(tokens * share / size)) * size // LENGTH
        contexts = np.resize(prompts, count)
        made, accepted = generate(name, contexts, generator)
        steps = steps_of(language, contexts, made, accepted, fault)
        for start in range(0, len(steps), size):
            part = Steps(*(getattr(steps, field)[start : start + size] for field in Steps.__slots__))
            conditional, out = condition_steps(name, part, is_raw=True)
            evidence.add(name, conditional)
            removed += out
    return evidence, removed


def sampler(language: Language, fault: str = RIGHT) -> Generate:
    """Speculative sampling, right or with a fault."""
    samplers = {name: Sampler(language, fault, *params) for name, (_, *params) in _LOOKS.items()}
    return lambda name, contexts, generator: samplers[name].generate(contexts, LENGTH, generator)


def bias_sampler(language: Language, probs: FloatArray) -> Generate:
    """Ordinary sampling at temperature 1 from other distributions, [V * V, V]; the two short looks are right."""
    right = sampler(language)

    def generate(name: str, contexts: IntArray, generator: np.random.Generator) -> tuple[IntArray, IntArray]:
        if name != MAIN:
            return right(name, contexts, generator)
        made = np.zeros((len(contexts), LENGTH), np.int64)
        sums = probs.cumsum(axis=1)
        for i in range(LENGTH):
            uniforms = generator.random((len(contexts), 1))
            made[:, i] = np.minimum((sums[contexts] < uniforms).sum(axis=1), language.size - 1)
            contexts = language.after(contexts, made[:, i])
        return made, np.zeros_like(made)

    return generate


def biases(language: Language) -> dict[str, FloatArray]:
    """Distributions that differ from the target's by a mean total variation of VARIATION, [V * V, V] each."""
    target = language.target
    draft = language.draft
    first = np.zeros_like(target)
    np.put_along_axis(first, target.argmax(axis=1)[:, None], 1.0, axis=1)

    def normalize(probs: FloatArray) -> FloatArray:
        return np.asarray(probs / probs.sum(axis=1, keepdims=True))

    most = target.max(axis=1, keepdims=True)
    forms: dict[str, Callable[[float], FloatArray]] = {
        "the first choice too often": lambda amount: target + amount * (first - target),
        "a lower temperature": lambda amount: normalize(target ** (1 + amount)),
        "the least probable tokens missing": lambda amount: normalize(
            np.where(target > amount * most, target, 0.0)
        ),
        "the draft mixed in": lambda amount: target + amount * (draft - target),
    }

    def variation(form: Callable[[float], FloatArray], amount: float) -> float:
        return float(0.5 * np.abs(form(amount) - target).sum(axis=1).mean())

    return {name: form(_argument_of(VARIATION, partial(variation, form))) for name, form in forms.items()}


def _argument_of(wanted: float, rising: Callable[[float], float]) -> float:
    """Where a rising function has a value, by bisection."""
    low = 0.0
    high = 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def judge(evidence: Evidence, removed: int) -> float:
    """The lowest level at which an audit with this evidence has a finding; a real one has it below `ALPHA`."""
    return 0.0 if removed > 2 else evidence.level


def false_alarms(runs: int, tokens: int) -> Iterator[float]:
    """Levels of audits of right samplers."""
    languages = [Language.random(seed=seed) for seed in range(min(runs, 20))]  # making one takes long
    for seed in range(runs):
        language = languages[seed % len(languages)]
        yield judge(*simulate(language, sampler(language), seed, tokens))


def _count_by_level(levels: Sequence[float]) -> str:
    counts = (f"{sum(found < level for found in levels)} at {level:g}" for level in _LEVELS)
    return f"of {len(levels)} by level: {', '.join(counts)}"


def main(options: argparse.Namespace) -> None:
    """Simulate what the command line asks for, and print it."""
    levels = list[float]()
    for level in false_alarms(options.false_alarms, options.tokens):
        levels.append(level)
        if len(levels) % 50 == 0 or len(levels) == options.false_alarms:
            _write(f"right samplers accused {_count_by_level(levels)}\n")
    language = Language.random()
    small = {name: bias_sampler(language, probs) for name, probs in biases(language).items()}

    def show(name: str, generate: Generate, count: int, fault: str = RIGHT) -> None:
        runs = [simulate(language, generate, seed, options.tokens, fault) for seed in range(count)]
        paths = (evidence.path for evidence, _ in runs)
        # Until the e-process crosses its level; all where it does not
        crossings = (next((tokens for tokens, value in each if value > LEVEL), each[-1][0]) for each in paths)
        tokens = int(np.median(list(crossings)))
        found = _count_by_level([judge(*each) for each in runs])
        _write(f"{name}: found {found}; the e-process crosses at {tokens:,} tokens (median)\n")

    for fault in FAULTS if options.faults else ():
        show(fault, sampler(language, fault), options.faults, fault)
    for name, generate in small.items() if options.power else ():
        show(name, generate, options.power)


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for option in ("--false-alarms", "--faults", "--power"):
        parser.add_argument(option, type=int, default=0, metavar="RUNS")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run")
    main(parser.parse_args())
