"""`python -m serve_app`."""

import sys

from serve_app.cli import main

sys.exit(main())
