"""Put the example's flat modules on the path."""

import sys

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "word2vec"))
