"""The state of a mount: its counters and reports, and how commands reach its daemon.

`counters.py` is the shared memory in which workers count requests and the supervisor finds requests that kill
workers. `status_report.py` makes the one report that `wdsfs status`, `status.json` and Prometheus show,
`dot_wdsfs.py` serves the hidden directory `.wdsfs` with it, `text_ring.py` keeps texts for reads that come
later. `control.py` has the files and the socket by which commands find a daemon. Start with `status_report.py`.
"""
