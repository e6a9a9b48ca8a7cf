"""`python -m tidegate_engine`."""

import signal
import sys

# Before the imports, which take a while: the first process of a container ignores a signal that it
# has no handler for, and would start and serve after it was told to end.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from tidegate_engine.main import main  # noqa: E402

sys.exit(main())
