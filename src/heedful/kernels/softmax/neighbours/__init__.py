"""Attention over lists of neighbours; the cost is proportional to the number of pairs, wherever they lie."""
