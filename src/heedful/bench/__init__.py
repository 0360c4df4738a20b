"""heedful against its peers, in one run: `heedful bench`, or `make bench`, which installs the peers first.

    peers    the same work by heedful, by another package and by dense softmax, in interleaved rounds
    growth   time of every entry of the catalogue from 128 to 32,768 tokens: exponents, and crossovers with softmax
    memory   what each of them allocates, up to 131,072 tokens

Every measurement is a flat row with its provenance, written as soon as it is taken (`rows.py`); tables and the plot are
functions of rows. A new comparison is one `Case` in `cases.py`, a new peer one function in `peers.py`. All of it runs
with torch alone: a peer that is missing is named in the table.
"""
