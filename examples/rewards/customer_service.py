"""Answers of a shop: the right action, the order's number, short. For examples/customer_service.jsonl.

    python grpo_async.py --model FOLDER --data examples/customer_service.jsonl --max-tokens 96 \\
        --reward examples/rewards/customer_service.py:action --reward examples/rewards/customer_service.py:reply=0.5

The pattern for one's own data: a few facts per row that a program can check (here `action` and `order`), one small
function per thing that is wanted, weights instead of one formula.
"""
import re


def text_of(completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def action(completions, action, **_) -> list[float]:
    """1 when the first line names the wanted action, 0.1 when it at least names one, so that the form is learned first."""
    scores = []
    for completion, want in zip(completions, action):
        named = re.match(r"ACTION: (REFUND|TRACK|EXCHANGE|HUMAN)\s*(\n|$)", text_of(completion))
        scores.append(0.0 if not named else 1.0 if named[1] == want else 0.1)
    return scores


def reply(completions, order, finish_reasons, **_) -> list[float]:
    """1 for a second line that names the order in at most 40 words and ends by itself; 0 otherwise."""
    scores = []
    for completion, number, reason in zip(completions, order, finish_reasons):
        lines = text_of(completion).strip().splitlines()
        is_right = len(lines) == 2 and number in lines[1] and len(lines[1].split()) <= 40 and reason == "stop"
        scores.append(float(is_right))
    return scores
