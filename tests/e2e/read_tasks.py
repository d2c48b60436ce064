"""Read numbers by a task queue, in batches, and note each batch once it was "trained on"."""

import itertools
import sys

from edl import cloud_reader

paths, url, notes, passes = sys.argv[1:]
BATCH = 8
reader = cloud_reader(paths, url, queue="numbers", in_use=BATCH, lease_s=2.0)
for _ in range(int(passes)):
    records = reader()
    while batch := list(itertools.islice(records, BATCH)):
        with open(notes, "a") as out:  # one write: a kill leaves all of it or nothing
            out.write(",".join(str(int(row[0])) for row in batch) + "\n")
