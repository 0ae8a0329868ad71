"""``python -m streamattn``: the same as the command ``streamattn``."""

import sys

from streamattn.cli import main

sys.exit(main())
