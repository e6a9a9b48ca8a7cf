"""`python -m tidegate_engine`."""

import sys

from tidegate_engine.main import main

sys.exit(main())
