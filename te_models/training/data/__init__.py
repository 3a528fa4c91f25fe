"""Token data sets: built from text, digested, and read in an order that a resumed run repeats."""
