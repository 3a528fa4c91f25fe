"""What a run shows beside its metrics file: writers for dashboards, traces, curves, reports.

metrics.jsonl stays the truth: everything here is made of its rows.
"""
