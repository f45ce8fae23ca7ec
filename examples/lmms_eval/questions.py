"""Turn a row of questions.parquet into messages of lmms-eval, and score the answer."""

import io
import json

from PIL import Image


def images(row):
    return [Image.open(io.BytesIO(data)) for data in row["images"]]


def text(row, lmms_eval_specific_kwargs=None):
    parts = [part for turn in json.loads(row["messages"]) for part in turn["content"]]
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def messages(row, lmms_eval_specific_kwargs=None):
    """Return the messages of the data, with the images between the texts as they are there."""
    remaining = iter(images(row))
    turns = json.loads(row["messages"])
    for turn in turns:
        turn["content"] = [
            {"type": "image", "url": next(remaining)} if part["type"] == "image" else part for part in turn["content"]
        ]
    return turns


def score(row, answers):
    return {"exact_match": float(answers[0].strip() == row["answer"].strip())}
