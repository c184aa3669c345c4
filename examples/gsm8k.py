"""A local copy of GSM8K (or any set of questions with number answers) as --data.

    python examples/gsm8k.py train.jsonl > gsm8k.jsonl
    python examples/gsm8k.py train-00000-of-00001.parquet > gsm8k.jsonl     # needs pyarrow
    python examples/gsm8k.py questions.csv --question problem --answer solution > d.jsonl

Reads JSON lines, one JSON array, CSV, or Parquet. Writes {"prompt": [chat message], "answer": "72"}: of an answer that
ends in "#### 72" only what follows. Rows without a question or an answer are counted on stderr and left out.
"""
import argparse
import csv
import json
import sys
from pathlib import Path

ASK = "{question}\nThink step by step, then give the final answer as \\boxed{{number}}."


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        import pyarrow.parquet
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines(keepends=True)))
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--question", default="question", metavar="COLUMN", help="default %(default)s")
    parser.add_argument("--answer", default="answer", metavar="COLUMN", help="default %(default)s")
    args = parser.parse_args()
    try:
        rows = read(args.file)
    except (OSError, ValueError, ImportError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    left_out = 0
    for row in rows:
        question, answer = (str(row.get(column) or "").strip() for column in (args.question, args.answer))
        if question and answer:
            final = answer.split("####")[-1].strip().replace(",", "")
            print(json.dumps({"prompt": [{"role": "user", "content": ASK.format(question=question)}], "answer": final}))
        else:
            left_out += 1
    if left_out:
        print(f"{left_out} of {len(rows)} rows lack {args.question} or {args.answer}", file=sys.stderr)
    return 0 if left_out < len(rows) else 2


if __name__ == "__main__":
    sys.exit(main())
