"""Run the job client of a node: `python -m job_client`."""

import sys

from job_client.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
