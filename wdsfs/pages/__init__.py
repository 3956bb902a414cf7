"""A set as pages in a browser: `wdsfs view`.

A request goes through `server.py`, which decides who may ask, to `site.py` (which address shows what), `grid.py`,
and `downloads.py`. These read the set that `shown_set.py` has opened, through a snapshot, with the filters of
`filters.py`; `set_query.py` answers these from a table that `table_maker.py` makes. Previews are plain data
(`preview.py`), made and cached by `previewer.py`, and safe to show although others have written the bytes: what
needs one of `decoders.py` is made by processes of their own (`decoding_process.py`, confined by `sandbox.py`),
over the messages of `wire.py`. What a set shows is decided elsewhere: this room gets a tree, as a mount does. The
extra `view` is imported in this room only, when a command needs it. Start with `site.py`.
"""
