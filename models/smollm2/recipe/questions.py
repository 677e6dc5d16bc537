"""Questions for the model: every combination of the words below, in a fixed order at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

SUBJECTS = (
    "a lighthouse", "honey bees", "the moon", "a rainy market", "volcanoes", "an old bicycle", "bread", "chess",
    "a mountain village", "electric cars", "whales", "a lost key", "the human heart", "trains", "gardening", "snow",
    "the Roman Empire", "a shy robot", "coffee", "music", "the desert", "a broken clock", "photosynthesis", "football",
    "public libraries", "gravity", "a small bakery", "recycling", "dinosaurs", "a long winter", "the printing press",
    "friendship", "swimming", "a talking cat", "the water cycle", "bridges", "sleep", "a school play", "solar panels",
    "spiders", "the invention of the telephone", "a night train", "vegetables", "vaccines", "a wooden boat", "painting",
    "earthquakes", "a new neighbour", "the metric system", "running", "forests", "a hidden door", "computers", "tea",
    "the French Revolution", "an honest thief", "magnets", "camping", "penguins", "a birthday present", "the internet",
    "budgeting", "rivers", "a young inventor", "cheese", "astronauts", "an empty theatre", "dreams", "rice", "wolves",
    "the stock market", "a forgotten letter", "meditation", "glaciers", "a street musician", "atoms", "elephants",
    "a village festival", "democracy", "yoga", "the ocean floor", "a kind giant", "batteries", "chocolate", "maps",
    "an island school", "black holes", "cycling to work", "owls", "a stolen painting", "the seasons", "patience",
    "bacteria", "a travelling doctor", "board games", "rainbows", "a farm in spring", "encryption", "horses", "soup",
)  # fmt: skip
"""Of what is asked in training."""

HELD_OUT_SUBJECTS = (
    "kites", "a retired sailor", "thunderstorms", "the Silk Road", "apple trees", "a noisy parrot", "fractions",
    "hiking", "a power cut", "windmills", "the nervous system", "a paper crown",
)  # fmt: skip
"""Of what is asked to measure the head."""

QUESTIONS = (
    "Write a short story about {}.", "Explain {} to a ten-year-old.", "What are three interesting facts about {}?",
    "Write a poem of eight lines about {}.", "Why do people care about {}?", "Give me a list of ten words about {}.",
    "Write a letter to a friend about {}.", "What should a beginner know about {}?", "Describe {} in one paragraph.",
    "Write a dialogue between two people about {}.", "Write an advertisement that mentions {}.",
    "What are the advantages and disadvantages of {}?", "Write five questions for a quiz about {}.",
    "Summarize what you know about {} in two sentences.", "Tell me a joke about {}.", "How has {} changed over time?",
    "Write the first paragraph of a novel about {}.", "Write an outline for an essay about {}.",
    "Write a news report about {}.", "Suggest five titles for a book about {}.", "What is the history of {}?",
    "Write an email that invites colleagues to a talk about {}.", "Compare {} with something similar.",
    "Write a step-by-step guide that has to do with {}.", "What would the world be like without {}?",
    "Write a diary entry about {}.", "List the most important terms about {} and define each.",
    "What is the most common mistake people make about {}?", "Write a speech of one minute about {}.",
    "Give advice to someone who is worried about {}.",
)  # fmt: skip

TASKS = (
    "returns the largest number of a list", "counts the vowels in a string", "checks whether a word is a palindrome",
    "removes duplicates from a list", "reverses a string", "computes the factorial of a number",
    "sorts a list of names", "reads a file and counts its lines", "converts Celsius to Fahrenheit",
    "finds the average of a list of numbers", "merges two dictionaries", "checks whether a number is prime",
    "prints the first n Fibonacci numbers", "splits a sentence into words",
    "finds the longest word in a sentence", "flattens a nested list",
    "counts how often each word occurs", "draws a random card from a deck", "validates an email address",
    "computes the area of a circle", "finds the common elements of two lists", "converts a number to binary",
    "groups words by their first letter", "rotates a list by n places",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "Java", "C++")
HELD_OUT_TASKS = ("finds the second smallest number of a list", "swaps the case of each letter in a string")
CODE_QUESTIONS = (
    "Write a {} function that {}.", "Show me {} code that {}, and explain it line by line.",
    "Write a {} program that {}, with a test.",
)  # fmt: skip

GOODS = ("apples", "books", "tickets", "pencils", "eggs", "chairs", "stamps", "oranges")
PEOPLE = ("Anna", "Omar", "Lucia", "Ben", "Mei", "Jonas", "Priya", "Carlos")
SUMS = (
    "{} has {} {} and buys {} more. How many are there now? Explain each step.",
    "{} sells {} {} at {} dollars each. How much money is that? Show your work.",
    "{} shares {} {} equally among {} friends. How many does each get?",
)

SENTENCES = (
    "The meeting about {} was moved to Thursday because the room was not free.",
    "My sister, who knows a lot about {}, has written a small book with many pictures.",
    "Last year the town spent more money on {} than on anything else, and some people were angry.",
    "After the long walk we sat down, talked about {} and drank something warm.",
)
REWRITES = (
    "Rewrite this more formally: {}", "Translate into French: {}", "Shorten this sentence: {}",
    "Turn this into a question: {}", "Find the nouns in this sentence: {}", "Continue this text: {}",
    "Repeat this sentence three times, each time with one more adjective: {}",
)  # fmt: skip


SEED = 25


def training_questions() -> list[str]:
    """Several thousand different questions, shuffled; none has a subject or task of the held-out ones."""
    return _shuffled(_about(SUBJECTS) + _code(TASKS) + _sums(random.Random(SEED), 400))


def held_out_questions() -> list[str]:
    """Questions to measure with: the same kinds, about other things."""
    return _shuffled(_about(HELD_OUT_SUBJECTS) + _code(HELD_OUT_TASKS) + _sums(random.Random(SEED + 1), 16))


def _about(subjects: Sequence[str]) -> list[str]:
    asked = [question.format(subject) for subject in subjects for question in QUESTIONS]
    sentences = [sentence.format(subject) for subject in subjects for sentence in SENTENCES]
    return asked + [REWRITES[index % len(REWRITES)].format(text) for index, text in enumerate(sentences)]


def _code(tasks: Sequence[str]) -> list[str]:
    return [
        question.format(language, task)
        for task in tasks
        for language in LANGUAGES
        for question in CODE_QUESTIONS
    ]


def _sums(chooser: random.Random, count: int) -> list[str]:
    return sorted(
        {
            chooser.choice(SUMS).format(
                chooser.choice(PEOPLE),
                chooser.randint(3, 90),
                chooser.choice(GOODS),
                chooser.randint(2, 12),
            )
            for _ in range(count)
        }
    )


def _shuffled(questions: list[str]) -> list[str]:
    random.Random(SEED).shuffle(questions)
    return questions
