"""A right number, with part of the reward for coming near.

    python grpo_async.py --model FOLDER --data d.jsonl --reward examples/rewards/numeric.py:correct
    python grpo_async.py --model FOLDER --data d.jsonl --reward examples/rewards/numeric.py:near

A reward function gets lists with one item per completion of a prompt, and returns one number for each (None: leave that
rollout out): prompts, completions, completion_ids, finish_reasons, and every other column of the data, here `answer`.
"""
import math
import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def text_of(completion) -> str:
    """Chat prompts give completions as messages, text prompts as text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(completion) -> float | None:
    found = NUMBER.findall(text_of(completion))
    return float(found[-1].replace(",", "")) if found else None


def correct(completions, answer, **_) -> list[float]:
    """1 when the last number equals the answer column, else 0."""
    return [float(last_number(c) == float(a)) for c, a in zip(completions, answer)]


def near(completions, answer, **_) -> list[float]:
    """1 for the answer, falling with the relative error: e^-1 at 10 % off, 0 without any number."""
    return [0.0 if (x := last_number(c)) is None else math.exp(-10 * abs(x - float(a)) / max(1.0, abs(float(a))))
            for c, a in zip(completions, answer)]
