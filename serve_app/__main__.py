"""`python -m serve_app`."""

import sys

from serve_app.cli.commands import main

sys.exit(main())
