"""Small data sets in their public formats."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Fields = dict[str, Any]


def jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    return path


def listed(path: Path, records: Sequence[object]) -> Path:
    """One JSON list, each record on lines of its own."""
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return path


def qa(**changes: object) -> Fields:
    return {"question": "Who rules Arn?", "answers": ["Oda Rime"]} | changes


def musique(number: int = 0, **changes: object) -> Fields:
    return {
        "id": f"2hop__{number}_1",
        "paragraphs": [
            {"idx": 0, "title": "Vell", "paragraph_text": "Vell is a port in Arn.", "is_supporting": True},
            {"idx": 1, "title": "Arn", "paragraph_text": "Arn is ruled by Oda Rime.", "is_supporting": True},
        ],
        "question": "Who rules the land of Vell?",
        "question_decomposition": [],
        "answer": "Oda Rime",
        "answer_aliases": ["Rime", "Oda Rime"],
        "answerable": True,
    } | changes


def wiki(number: int = 0, **changes: object) -> Fields:
    return {
        "_id": f"w{number}",
        "type": "comparison",
        "question": "Which port is older, Vell or Marn?",
        "context": [["Vell", ["Vell is a port.", " It was built in 1310."]], ["Marn", ["Marn was built in 1422."]]],
        "supporting_facts": [["Vell", 1], ["Marn", 0]],
        "evidences": [],
        "answer": "Vell",
    } | changes


def ctxs(**changes: object) -> Fields:
    return {
        "ctxs": [{"title": "", "text": "Vell is a port in Arn."}, {"title": "Arn", "text": "Oda Rime rules Arn."}],
        "question": "Who rules the land of Vell?",
        "answers": ["Oda Rime"],
    } | changes


def samsum(number: int = 0, **changes: object) -> Fields:
    return {
        "id": str(13000 + number),
        "summary": f"Ann brings cake number {number}.",
        "dialogue": f"Ann: I bring cake {number}.\r\nBob: Great!",
    } | changes


def news(**changes: object) -> Fields:
    return {"document": "First news. NEWLINE_CHAR More. ||||| Second news. |||||", "summary": "– Two news."} | changes


def longbench(subtask: str, number: int = 0, **changes: object) -> Fields:
    """A record of any subtask; what it asks and answers is of the subtask's form."""
    fields: Fields = {
        "input": "Who rules Arn?",
        "context": "Passage 1:\nVell is a port in Arn.\n\nPassage 2:\nArn is ruled by Oda Rime.",
        "answers": ["Oda Rime", "Rime"],
        "length": 14,
        "dataset": subtask,
        "language": "en",
        "all_classes": None,
        "_id": f"{number:048x}",
    }
    return fields | _OF_SUBTASK.get(subtask, {}) | changes


_OF_SUBTASK: dict[str, Fields] = {
    "gov_report": {"input": "", "answers": ["A report on ports."]},
    "multi_news": {"input": "", "answers": ["News of ports."]},
    "trec": {
        "input": "Question: Where is Vell ?\nType:",
        "context": "Question: Who rules Arn ?\nType: Individual\nQuestion: What is a port ?\nType: Definition\n",
        "answers": ["Other location"],
        "all_classes": ["Individual", "Definition", "Other location", "location"],
    },
    "triviaqa": {
        "input": "Passage:\nArn is ruled by Oda Rime.\nQuestion:\nWho rules Arn?\nAnswer:\n",
        "context": "Passage:\nVell is a port.\nQuestion:\nWhat is Vell?\nAnswer:\nA port\nPassage:\nMarn too.\n",
    },
    "samsum": {
        "input": "Dialogue: Ann: Cake?\nBob: Yes.\nSummary: ",
        "context": "Dialogue: Ann: Hi.\nSummary: Ann greets.\nDialogue: Bob: Bye.\nSummary: Bob leaves.\n",
        "answers": ["Bob wants cake."],
    },
    "passage_count": {
        "input": "",
        "context": "Paragraph 1: One.\n\nParagraph 2: Two.\n\nParagraph 3: One.",
        "answers": ["2"],
    },
    "passage_retrieval_en": {
        "input": "It says two.",
        "context": "Paragraph 1: One.\n\nParagraph 2: Two.",
        "answers": ["Paragraph 2"],
    },
    "lcc": {
        "input": "",
        "context": "import os\n\n\ndef home():\n    return os.path\n\n\ndef root():\n",
        "answers": ["    return '/'"],
    },
    "repobench-p": {
        "input": "def main():\n    x = one()\n",
        "context": "# Path: a.py\ndef one():\n    return 1\n",
        "answers": ["    print(x)"],
    },
}
