"""Writing a folder: shards planned, tensors streamed, sidecar files copied, killed conversions resumed.

May import: `te_models.layers`, `te_models.config`, and the rooms before it: io, plan, formats, families, folder.
"""
