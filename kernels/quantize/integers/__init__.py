"""Integers of four or eight bits with a scale per group of a row, and perhaps a zero point: weights alone have them."""
