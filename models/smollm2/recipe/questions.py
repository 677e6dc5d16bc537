"""Questions for the model: every combination of the recipe's words, in a fixed order at random."""

import random
from collections.abc import Sequence

from models.smollm2.recipe import words

SEED = 25


def training_questions() -> list[str]:
    """Several thousand different questions, shuffled; none has a subject or task of the held-out ones."""
    return _shuffled(_about(words.SUBJECTS) + _code(words.TASKS) + _sums(random.Random(SEED), 400))


def held_out_questions() -> list[str]:
    """Questions to measure with: the same kinds, about other things."""
    return _shuffled(
        _about(words.HELD_OUT_SUBJECTS) + _code(words.HELD_OUT_TASKS) + _sums(random.Random(SEED + 1), 16)
    )


def _about(subjects: Sequence[str]) -> list[str]:
    asked = [question.format(subject) for subject in subjects for question in words.QUESTIONS]
    sentences = [sentence.format(subject) for subject in subjects for sentence in words.SENTENCES]
    rewrites = words.REWRITES
    return asked + [rewrites[index % len(rewrites)].format(text) for index, text in enumerate(sentences)]


def _code(tasks: Sequence[str]) -> list[str]:
    return [
        question.format(language, task)
        for task in tasks
        for language in words.LANGUAGES
        for question in words.CODE_QUESTIONS
    ]


def _sums(chooser: random.Random, count: int) -> list[str]:
    return sorted(
        {
            chooser.choice(words.SUMS).format(
                chooser.choice(words.PEOPLE),
                chooser.randint(3, 90),
                chooser.choice(words.GOODS),
                chooser.randint(2, 12),
            )
            for _ in range(count)
        }
    )


def _shuffled(questions: list[str]) -> list[str]:
    random.Random(SEED).shuffle(questions)
    return questions
