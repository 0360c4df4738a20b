"""Attention over lists of neighbours: work in proportion to the pairs, wherever they lie."""
