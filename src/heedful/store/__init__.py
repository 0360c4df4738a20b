"""Storage of records: append-only, checksummed, readable after a kill, with provenance.

    log = Log("runs/theory/findings.jsonl")           # .jsonl, or .jsonl.gz for large records
    log.append({"id": "T1", "verdict": "HOLDS"})      # on the disk when this returns
    for record in log.records(): ...                  # every whole record, in the order in which they were written
    log.latest("id")                                  # {("T1",): the last record with this id}: resume with it

    write_whole("page.html", text)                    # replaces a file atomically
    provenance()                                      # {"commit", "torch", "python", "cpu"}

A log is a file of JSON lines that only grows; the standard library reads and writes it.

- Plain (`.jsonl`): each line begins with the checksum of its own bytes, `{"sum":"…",`.
- Compressed (`.jsonl.gz`): each append is one gzip member, whose CRC-32 is the checksum. `zcat` shows the lines.

A killed process loses only the append that it was writing: readers skip a truncated end, with a warning. Before the
next append, incomplete bytes are moved to `<name>.damaged`, with a `Damaged` warning if they are more than a truncated
end. Several processes may append to one log: an append locks the file.

Used by scans (`store.scans`, tables in polars), theory (findings) and bench (rows of measurements). The files
`records-*.jsonl.gz` of studies are logs of this format.
"""

from heedful.store.log import Damaged, Log, Unwritable, write_whole
from heedful.store.provenance import commit, cpu, now, provenance, version

__all__ = ["Damaged", "Log", "Unwritable", "commit", "cpu", "now", "provenance", "version", "write_whole"]
