"""What families are written in: configuration fields, weight maps, names, and the entries that several share.

May import: `te_models.config`, `...io`, `...plan`.
"""
