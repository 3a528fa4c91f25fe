"""Runs over several ranks: whose batches are mine, distributed experts, and ranks that stop answering."""
