"""The command line `te-models`: one small file per group of verbs, without logic.

May import everything in te_models, inside the functions that run a verb: building the parser, and so `--help`, imports
neither torch nor any optional package.
"""
