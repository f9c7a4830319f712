"""`python -m bittrain_tf`: the `bittrain` command."""

import sys

from bittrain_tf.cli import main

if __name__ == "__main__":
    sys.exit(main())
