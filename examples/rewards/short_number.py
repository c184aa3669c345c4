"""A reward file with two functions: a right number, and a bonus for few tokens.

    python grpo_async.py --model FOLDER --data d.jsonl \\
        --reward examples/rewards/short_number.py:correct --reward examples/rewards/short_number.py:short=0.2

Every function gets lists with one item per completion, and returns one number (or None: leave it out) for each:
prompts, completions, completion_ids, finish_reasons, and every other column of the data (here: answer).
"""
import re


def text_of(completion) -> str:
    """Chat prompts give completions as messages, text prompts as text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def correct(completions, answer, **_) -> list[float]:
    """1 when the last number equals the answer column."""
    return [float(re.findall(r"-?\d+", text_of(c))[-1:] == [str(a)]) for c, a in zip(completions, answer)]


def short(completion_ids, **_) -> list[float]:
    """From 1 for one token down to 0 for 64 and more."""
    return [max(0.0, 1 - len(ids) / 64) for ids in completion_ids]
