"""Attention by tiles, for every mechanism whose weights are a function of one row of scores."""
