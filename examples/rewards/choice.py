"""Multiple choice: the letter of the answer column, and no other letter named as the answer.

    python grpo_async.py --model FOLDER --data d.jsonl --reward examples/rewards/choice.py:letter

Rows: {"prompt": "… A) … B) … End with: Answer: <letter>", "answer": "B"}.
"""
import re


def letter(completions, answer, **_) -> list[float]:
    """1 for "Answer: B" (or "(B)", or a lone "B" at the end); 0 when two different letters are named, so that
    listing them all earns nothing."""
    scores = []
    for completion, want in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        named = re.findall(r"(?i:answer)\W{0,5}(?:is\W{0,3})?\(?([A-J])\b", text) or re.findall(r"\(?\b([A-J])\b\)?[\s.]*$", text)
        scores.append(float(set(named) == {str(want).strip().upper()}))
    return scores
