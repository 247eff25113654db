"""A job annotates every row of a CSV file, and continues where it was interrupted.

The template makes a prompt from the columns of a row, and `choice` allows two labels. The output is a CSV
file too: the row's columns, then the label. The first run has a limit of two rows; the second run draws
only the missing rows. A run after a crash continues in the same way.
"""

import asyncio
import csv
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
    reviews, labels = folder / "reviews.csv", folder / "labels.csv"
    reviews.write_text(REVIEWS)
    # With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
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
    with labels.open(newline="") as file:
        for row in csv.DictReader(file):
            print(row["id"], row["text"].strip(), "-", row["review"])


with tempfile.TemporaryDirectory() as path:
    asyncio.run(annotate(Path(path)))

# Output:
# 2 rows done, 0 done before
# 2 rows done, 2 done before
# 1 good - I loved every minute of it
# 2 bad - The waiter was rude and the soup was cold
# 3 good - A wonderful, funny book
# 4 bad - It broke after one day
