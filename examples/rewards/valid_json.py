"""JSON that must validate: parsed, then held against a small schema in the row.

    python grpo_async.py --model FOLDER --data d.jsonl --reward examples/rewards/valid_json.py:valid

Rows: {"prompt": "…", "schema": {"name": "string", "age": "number", "tags": "array"}}: the keys that must be there and
their JSON types. For whole JSON Schema, call jsonschema.validate here instead.
"""
import json
import re

TYPES = {"string": str, "number": (int, float), "boolean": bool, "array": list, "object": dict, "null": type(None)}


def is_type(value, name: str) -> bool:
    # Subtle: in Python True is an int.
    return isinstance(value, TYPES[name]) and not (name == "number" and isinstance(value, bool))


def valid(completions, schema, **_) -> list[float]:
    """0.2 for JSON at all (alone, or in one fenced block), up to 1 by the share of keys with the right type; a key that
    the schema does not name costs as much as a missing one."""
    scores = []
    for completion, want in zip(completions, schema):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except ValueError:
            scores.append(0.0)
            continue
        if not isinstance(value, dict):
            scores.append(0.2)
            continue
        right = sum(key in value and is_type(value[key], kind) for key, kind in want.items())
        scores.append(0.2 + 0.8 * right / max(1, len(want.keys() | value.keys())))
    return scores
