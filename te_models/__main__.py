"""`python -m te_models` is `te-models`."""

from .cli.main import main

raise SystemExit(main())
