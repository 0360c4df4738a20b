"""The one store: records that are appended, checksummed, read back after a kill, and say where they come from.

    log = Log("runs/theory/findings.jsonl")           # .jsonl, or .jsonl.gz for large records
    log.append({"id": "T1", "verdict": "HOLDS"})      # on the disk when this returns
    for record in log.records(): ...                  # every whole record, in the order in which they were written
    log.latest("id")                                  # {("T1",): the last record with this id}: resume with it

    write_whole("page.html", text)                    # a file that is replaced at once, or stays as it was
    provenance()                                      # {"commit", "torch", "python", "cpu"}

A log is a file of JSON lines that only grows; the standard library reads and writes it.

- Plain (`.jsonl`): each line begins with the checksum of its own bytes, `{"sum":"…",`.
- Compressed (`.jsonl.gz`): each append is one gzip member, whose CRC-32 is the checksum. `zcat` shows the lines.

A process that is killed loses the append it was at and no other: readers leave a cut-off end out, with a warning.
Before the next append, everything that is not whole is moved to `<name>.damaged`, with a `Damaged` warning if it is
more than a cut-off end. Several processes may append to one log: an append locks the file.

Who uses it: scans (`store.scans`, tables by polars), theory (findings), bench (rows of measurements). Studies' files
`records-*.jsonl.gz` are logs of this form.
"""

from heedful.store.log import Damaged, Log, Unwritable, write_whole
from heedful.store.provenance import commit, cpu, now, provenance, version

__all__ = ["Damaged", "Log", "Unwritable", "commit", "cpu", "now", "provenance", "version", "write_whole"]
