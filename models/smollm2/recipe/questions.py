"""Questions for the model: every combination of the words in `words.json`, in a fixed order at random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
SEED = 25


def training_questions() -> list[str]:
    """Several thousand different questions, shuffled; none has a subject or task of the held-out ones."""
    return _questions(WORDS["subjects"], WORDS["tasks"], random.Random(SEED), 400)


def held_out_questions() -> list[str]:
    """Questions to measure with: the same kinds, about other things."""
    return _questions(WORDS["held_out_subjects"], WORDS["held_out_tasks"], random.Random(SEED + 1), 16)


def _questions(
    subjects: Sequence[str], tasks: Sequence[str], chooser: random.Random, sum_count: int
) -> list[str]:
    asked = [question.format(subject) for subject, question in product(subjects, WORDS["questions"])]
    sentences = (sentence.format(subject) for subject, sentence in product(subjects, WORDS["sentences"]))
    rewrites = WORDS["rewrites"]
    asked += [rewrites[index % len(rewrites)].format(text) for index, text in enumerate(sentences)]
    for task, language, question in product(tasks, WORDS["languages"], WORDS["code_questions"]):
        asked.append(question.format(language, task))
    asked += sorted({_sum(chooser) for _ in range(sum_count)})
    random.Random(SEED).shuffle(asked)
    return asked


def _sum(chooser: random.Random) -> str:
    form, person = chooser.choice(WORDS["sums"]), chooser.choice(WORDS["people"])
    return form.format(person, chooser.randint(3, 90), chooser.choice(WORDS["goods"]), chooser.randint(2, 12))
