"""A job annotates every row of a CSV file, and continues where it was interrupted.

Each row's prompt is made from its columns; each output line has the row, the text and its token counts.
`choice` allows two labels. The first run stops after two rows, as an interrupted one would; the second
run draws only the missing rows.
"""

import asyncio
import json
import tempfile
from pathlib import Path

import genrt
from genrt.generation import Job

REVIEWS = """id,review
1,I loved every minute of it
2,The waiter was rude and the soup was cold
3,"A wonderful, funny book"
4,It broke after one day
"""
TEMPLATE = """Review: It is a masterpiece. Verdict: good
Review: It was a waste of my money. Verdict: bad
Review: {review}. Verdict:"""


async def annotate(folder: Path) -> None:
    """Write a file of reviews, label it in two runs, and print the labels."""
    reviews, labels = folder / "reviews.csv", folder / "labels.jsonl"
    reviews.write_text(REVIEWS)
    # In float32 all CPUs print the same; the embedded model's own bfloat16 rounds differently on each.
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        for limit in (2, None):
            job = Job(
                reviews,
                labels,
                prompt_template=TEMPLATE,
                choice=[" good", " bad"],
                temperature=0,
                limit=limit,
            )
            report = await job.run(lm)
            print(f"{report.done} rows done, {report.skipped} done before")
    lines = map(json.loads, labels.read_text().splitlines())
    for line in sorted(lines, key=lambda line: int(line["index"])):
        print(line["input"]["id"], line["text"].strip(), "-", line["input"]["review"])


with tempfile.TemporaryDirectory() as path:
    asyncio.run(annotate(Path(path)))
