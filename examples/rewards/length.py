"""Length as a second reward, with a weight: right first, then short.

    python grpo_async.py --model FOLDER --data d.jsonl --max-tokens 512 \\
        --reward examples/rewards/numeric.py:correct --reward examples/rewards/length.py:overlong=0.5

Lengths are in tokens, the stop token included.
"""
LIMIT, SOFT = 512, 128  # --max-tokens, and how long before it the penalty begins


def overlong(completion_ids, **_) -> list[float]:
    """0 up to LIMIT - SOFT tokens, then down in a line to -1 at LIMIT: the soft punishment of DAPO, arXiv:2503.14476."""
    return [-min(1.0, max(0.0, (len(ids) - (LIMIT - SOFT)) / SOFT)) for ids in completion_ids]


def short(completion_ids, **_) -> list[float]:
    """From 1 for one token down to 0 for 64 and more."""
    return [max(0.0, 1 - (len(ids) - 1) / 63) for ids in completion_ids]
