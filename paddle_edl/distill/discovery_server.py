"""Run a discovery server (`edl discovery`): the original's, which was made for etcd.

Without --db_endpoints the registry is in the server's memory. `--db_type etcd` is refused.
"""

import sys

from distill_reader.discovery import main

if __name__ == "__main__":
    sys.exit(main())
