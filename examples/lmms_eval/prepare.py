"""Write questions.parquet beside this file: rows of chat data with their images, for questions.yaml.

python prepare.py build/quickstart/held_out.jsonl [NUMBER]
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [("id", pa.string()), ("messages", pa.string()), ("images", pa.list_(pa.binary())), ("answer", pa.string())]
)


def question(row, root):
    """Split a row into the messages up to the last answer, their images, and this answer."""
    turns = [{"role": turn["role"], "content": parts_of(turn["content"])} for turn in row["messages"]]
    answer = turns.pop()
    if answer["role"] != "assistant":
        raise SystemExit(f"{row['id']}: the last message is not an answer")
    files = [root / part.pop("image") for turn in turns for part in turn["content"] if part["type"] == "image"]
    return {
        "id": row["id"],
        "messages": json.dumps(turns),
        "images": [file.read_bytes() for file in files],
        "answer": "".join(part["text"] for part in answer["content"]),
    }


def parts_of(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def main(data, number=None):
    lines = data.read_text(encoding="utf-8").splitlines()[:number]
    rows = [question(json.loads(line), data.parent) for line in lines]
    target = Path(__file__).with_name("questions.parquet")
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), target)
    print(f"wrote {target}: {len(rows)} questions")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
