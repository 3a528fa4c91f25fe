"""Mathematics on plain tensors: the definition of every operation, and the fast ways to run it.

Each operation is a folder: `reference.py` defines its numbers in torch, `op.py` offers the one public function that
picks an implementation. May import: torch, triton. Nothing outside this folder calls Triton.
"""
