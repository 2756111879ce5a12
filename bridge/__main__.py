"""`python -m bridge`, for machines where iproute2's `bridge` comes first on PATH."""

import sys

from bridge.cli import main

sys.exit(main())
