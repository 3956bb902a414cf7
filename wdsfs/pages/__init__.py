"""A set as pages in a browser: `wdsfs view`.

A request goes through `server.py`, which decides who may ask, to `site.py` (the page of each address), `grid.py`,
and `downloads.py`. These read the set that `shown_set.py` has opened, through a snapshot, with the filters of
`filters.py`. `set_query.py` answers filters from a table that `table_maker.py` makes. Previews are plain data
(`preview.py`) that `previewer.py` makes and caches. They are safe to show although others have written the bytes:
`decoders.py` runs in processes of its own (`decoding_process.py`, confined by `sandbox.py`), which get and return
messages (`wire.py`). Other rooms decide the content of a set: this room gets a tree, as a mount does. The extra
`view` is imported in this room only, when a command needs it. Start with `site.py`.
"""
