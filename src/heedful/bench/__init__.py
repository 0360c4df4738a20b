"""Benchmarks of heedful against other packages: `heedful bench`, or `make bench`, which installs them first.

    peers    the same work by heedful, by another package and by dense softmax, in interleaved rounds
    growth   time of every catalogue entry from 128 to 32,768 tokens: exponents, and crossovers with softmax
    memory   what each entry allocates, up to 131,072 tokens

Every measurement is a flat row with its provenance, written at once (`rows.py`); tables and the plot are functions of
rows. A new comparison is one `Case` in `cases.py`, a new peer one function in `peers.py`. The benchmarks run with torch
alone; the table names peers that are not installed.
"""
