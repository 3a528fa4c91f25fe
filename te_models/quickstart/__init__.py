"""The main job end to end: a real model imported, checked, converted, upcycled, trained and exported.

May import everything in te_models. Nothing else imports this package but the command line.
"""
