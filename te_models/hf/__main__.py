"""`python -m te_models.hf serve FOLDER`, or `chat`: transformers' command line, extended to folders of te_models.

transformers' own command does not import this package, and so does not know the class that such a folder asks for. The
server is transformers': it speaks the protocol of OpenAI's clients.
"""

import os
import sys

if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath("."):
    del sys.path[0]  # Python put it there, before its own library: a json.py in a model's folder is not ours

from ..extras import require
from . import register

register()
require("transformers.cli.transformers", "serve", feature="python -m te_models.hf").main()
