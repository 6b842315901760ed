"""Questions for a chat model to answer: built in, or from files of benchmarks.

What is built in is put together from short lists, as many as are asked for: explanations, plans,
comparisons, letters, programs, sums in words, and pieces of Python's standard library to explain,
to document or to be asked about.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

KEYS = ("turns", "question", "prompt", "text")
"""Fields that a line of a file may have its question in, the first of `turns` counts."""

_SUBJECTS = (
    """photosynthesis|the water cycle|black holes|compound interest|the French Revolution
vaccines|plate tectonics|the stock market|jazz|sourdough bread|climate change|the Roman Empire
machine learning|electric cars|coral reefs|meditation|the printing press|inflation|DNA
solar panels|the Renaissance|chess openings|gravity|recycling|the Silk Road|sleep|volcanoes
democracy|antibiotics|the internet|coffee|bicycles|the moon landing|whales|impressionism|tides
supply and demand|earthquakes|the heart|beekeeping|rainbows|the Industrial Revolution|batteries
public libraries|migration of birds|lighthouses|glaciers|the violin|fermentation|bridges|tea
insurance|the immune system|haiku|satellites|dinosaurs|cooperatives|the compass|paper|deserts
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

_READERS = (
    "a ten-year-old", "a curious adult", "a student before an exam", "someone in a hurry",
    "a friend who dislikes science", "a new colleague",
)  # fmt: skip

_ABOUT = (
    "Explain {a} to {reader}.",
    "What are three surprising facts about {a}?",
    "Write a short paragraph on why {a} matters today.",
    "Compare {a} and {b} in a few sentences.",
    "Give me a five-step plan to learn more about {a}.",
    "List the advantages and disadvantages of {a}.",
    "Write a short story in which {a} and {b} both play a part.",
    "What is a common misunderstanding about {a}, and what is true?",
    "Write a friendly e-mail that invites {reader} to a talk on {a}.",
    "Write a quiz of four questions on {a}, with the answers.",
    "Summarise the history of {a} in five sentences.",
    "Write a poem about {a}.",
    "How would you start a conversation about {a} with {reader}?",
    "Which questions on {a} are still open?",
)

_PROGRAMS = (
    "counts the words of a text", "finds the second largest number of a list",
    "checks whether a string is a palindrome", "merges two sorted lists",
    "turns a Roman numeral into a number", "computes the first n Fibonacci numbers",
    "removes duplicates from a list and keeps the order", "reverses the words of a sentence",
    "finds all prime numbers below n", "parses a line of comma-separated values",
    "computes the distance of two points", "groups words by their first letter",
    "rotates a matrix by ninety degrees", "converts seconds to hours, minutes and seconds",
    "sorts a dictionary by its values", "finds the longest word of a file",
    "validates a date in the form YYYY-MM-DD", "flattens a nested list",
    "computes a moving average", "implements a stack with push and pop",
    "counts vowels in a string", "finds the common elements of two lists",
    "draws a triangle of stars", "simulates the throw of two dice", "encrypts text with a shift",
)  # fmt: skip

_CODE = (
    "Write a Python function that {task}.",
    "Write a Python program that {task}, and explain how it works.",
    "Show me a JavaScript function that {task}.",
    "Write a test for a Python function that {task}.",
    "How would you write a function that {task}? Give an example of its use.",
)

_SUMS = (
    "{who} buys {x} {things} at {y} dollars each and pays with {z} dollars. How much comes back?",
    "A train goes {x} kilometres an hour for {y} hours, then {z} kilometres more. How far is that?",
    "{who} reads {x} pages a day. How many days does a book of {z} pages take?",
    "There are {z} {things} in {x} boxes, equally many in each. {who} takes {y} boxes. How many "
    "{things} does {who} have?",
    "{who} had {z} {things}, gave away {x} and then bought {y} more. How many are there now?",
    "A garden is {x} metres long and {y} metres wide. How much fence goes around it, and what is "
    "its area?",
    "{who} earns {x} dollars an hour and works {y} hours a day. How much is that in {z} days?",
    "What is {x} + {y} * {z}? Show each step.",
)
_NAMES = ("Mara", "Tom", "Aisha", "Leo", "Ines", "Karl", "Yuki", "Ben", "Olga", "Sam")
_THINGS = ("apples", "pencils", "tickets", "stamps", "marbles", "books", "candles", "cards")

_TEXTS = (
    "Summarise the following text in two sentences.\n\n{text}",
    "What is the most important point of this text?\n\n{text}",
    "Rewrite the following text in plain words.\n\n{text}",
    "List the main points of this text.\n\n{text}",
)
_SOURCES = (
    "Explain what this Python function does.\n\n```python\n{code}\n```",
    "Add a docstring and comments to this function.\n\n```python\n{code}\n```",
    "Rename the arguments of this function to say what they are.\n\n```python\n{code}\n```",
    "Add type hints to this function and show the whole of it.\n\n```python\n{code}\n```",
)


def questions(n: int, seed: int = 0) -> list[str]:
    """`n` questions of all kinds in turn, no two alike; the same for the same seed.

    Raises ValueError for `n` below 1.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1, got {n}")
    rng = np.random.default_rng(seed)
    texts, sources = _library()
    found: dict[str, None] = {}
    while len(found) < n:
        a, b = rng.choice(_SUBJECTS, 2, replace=False)
        x, y = rng.integers(2, 13, 2)
        found |= dict.fromkeys(
            (
                _one(rng, _ABOUT).format(a=a, b=b, reader=_one(rng, _READERS)),
                _one(rng, _CODE).format(task=_one(rng, _PROGRAMS)),
                _one(rng, _SUMS).format(
                    x=x, y=y, z=x * rng.integers(13, 30), who=_one(rng, _NAMES),
                    things=_one(rng, _THINGS),
                ),
                _one(rng, _ABOUT).format(a=b, b=a, reader=_one(rng, _READERS)),
                _one(rng, _TEXTS).format(text=_one(rng, texts)),
                _one(rng, _SOURCES).format(code=_one(rng, sources)),
            )
        )  # fmt: skip
    return list(found)[:n]


def read_questions(file: Path | str) -> list[str]:
    """One question a line of JSON, as Spec-Bench, MT-Bench, GSM8K and MBPP are published.

    Raises ValueError for a line that is no JSON object with one of `KEYS`, by its number.
    """
    found = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            value = next(fields[key] for key in KEYS if key in fields)
            question = value if isinstance(value, str) else value[0]
            if not isinstance(question, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, StopIteration):
            raise ValueError(
                f"file: line {number} of {file} is no JSON object with a question under one of "
                f"{KEYS}: {line[:60]!r}"
            ) from None
        found.append(question)
    if not found:
        raise ValueError(f"file: {file} holds no question")
    return found


def _one(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def _library(shortest: int = 250, longest: int = 900) -> tuple[list[str], list[str]]:
    """Docstrings and functions of the standard library of `shortest`..`longest` characters."""
    texts, sources = [], []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        whole = file.read_text(encoding="utf-8", errors="replace")
        lines = whole.splitlines()
        for node in ast.walk(ast.parse(whole)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            text = ast.get_docstring(node) or ""
            if shortest <= len(text) <= longest:
                texts.append(text)
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if shortest <= len(code) <= longest:
                    sources.append(code)
    return texts, sources
