"""The benchmark: wdsfs and its peers in turn, on the same data, in one run. `python -m bench --help`."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy comes: what forks has one thread
