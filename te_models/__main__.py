"""`python -m te_models` is `te-models`."""

import os
import sys

if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath("."):
    del sys.path[0]  # Python put it there, before its own library: a json.py in a model's folder is not ours

from .cli.main import main

raise SystemExit(main())
